"""The figures that vLLM and SGLang export, by the same few names. Pure: the text of /metrics in, numbers out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{.*\})?\s+(\S+)")
_CACHE_DTYPE = re.compile(r'^vllm:cache_config_info\{(?:[^\n]*,)?cache_dtype="([^"\n]+)"', re.M)
_MAX_TEXT = 8 * 1024 * 1024
_NUM_BIRTH = 5  # made at the start; those of later requests come after them

# Figure -> names of the series that tell it. Of several that are there, the first.
_SUMS: dict[str, tuple[str, ...]] = {
    "num_running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "num_waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "prefix_query_tokens": (
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_queries",
        "sglang:prompt_tokens_total",
    ),
    "prefix_hit_tokens": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_hits", "sglang:cached_tokens_total"),
    "external_hit_tokens": ("vllm:external_prefix_cache_hits_total",),
    "transferred_bytes": ("vllm:nixl_bytes_transferred_sum",),
    "num_transfers": ("vllm:nixl_bytes_transferred_count",),
    "num_failed_transfers": ("vllm:nixl_num_failed_transfers_total", "sglang:num_transfer_failed_reqs_total"),
    "num_expired": ("vllm:nixl_num_kv_expired_reqs_total",),
}
_HIGHEST: dict[str, tuple[str, ...]] = {
    "kv_usage": ("vllm:kv_cache_usage_perc", "sglang:token_usage"),
}


@dataclass(frozen=True, slots=True)
class PdFigures:
    """What one server says at this moment. None = it doesn't."""

    num_running: float | None = None
    num_waiting: float | None = None
    kv_usage: float | None = None  # 0 to 1
    prefix_query_tokens: float | None = None
    prefix_hit_tokens: float | None = None
    external_hit_tokens: float | None = None  # that came from another server
    transferred_bytes: float | None = None
    num_transfers: float | None = None
    num_failed_transfers: float | None = None
    num_expired: float | None = None  # prefills whose KV nobody fetched in time


@dataclass(frozen=True, slots=True)
class Scraped:
    """A server's figures, or why there are none: they aren't exported, or couldn't be asked for."""

    figures: PdFigures | None = None
    missing: str | None = None


def scraped(status: int, text: str) -> Scraped:
    """Of an answer to GET /metrics."""
    if status != 200:
        return Scraped(missing=f"exports none: GET /metrics answers {status}")
    figures = read_figures(text)
    if figures == PdFigures():
        return Scraped(missing="exports none of these: GET /metrics has other series")
    return Scraped(figures)


def read_figures(text: str) -> PdFigures:
    samples = _samples(text)
    figures = {name: _first(samples, series, sum) for name, series in _SUMS.items()}
    figures |= {name: _first(samples, series, max) for name, series in _HIGHEST.items()}
    return PdFigures(**figures)


Join = Callable[[Iterable[float]], float]


def read_birth(text: str) -> tuple[float, ...]:
    """The instants at which a process made its first series: equal of one process alone. Empty if it tells too few.

    The start of the process won't do: it is told in hundredths of a second, and servers are started together.
    """
    created = {instant for name, values in _samples(text).items() if name.endswith("_created") for instant in values}
    return tuple(sorted(created)[:_NUM_BIRTH]) if len(created) >= _NUM_BIRTH else ()


def read_cache_dtype(text: str) -> str | None:
    """vLLM's own word for its KV dtype. None: it doesn't say, as the other engines don't."""
    found = _CACHE_DTYPE.search(text[:_MAX_TEXT])
    return found[1] if found is not None else None


def _samples(text: str) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}
    for line in text[:_MAX_TEXT].splitlines():
        match = _SAMPLE.match(line)
        if match is not None and (number := _number(match[2])) is not None:
            samples.setdefault(match[1], []).append(number)
    return samples


def _first(samples: dict[str, list[float]], names: Iterable[str], join: Join) -> float | None:
    return next((join(samples[name]) for name in names if name in samples), None)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < 1e300 else None
