"""One cache strategy as a client wrote it, in a word or an object. Raises InvalidRequest that names the channel."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from backends.protocol.messages import TransferMode
from gateway.core.errors import InvalidRequest
from gateway.core.spelling import parse_kv_dtype, parse_mode, parse_transfer
from gateway.core.types import CacheMode

# What a client may call each part: its own camelCase, and the snake_case of the settings files.
KEYS: dict[str, tuple[str, ...]] = {
    "mode": ("mode",),
    "chunk_size": ("chunkSize", "chunk_size"),
    "kv_cache_dtype": ("kvCacheDtype", "kv_cache_dtype"),
    "enable_prefix_cache": ("enablePrefixCache", "enable_prefix_cache", "prefix_cache"),
    "prefill_endpoint": ("prefillEndpoint", "prefill_endpoint", "prefill_base_url"),
    "decode_endpoint": ("decodeEndpoint", "decode_endpoint", "decode_base_url"),
    "transfer_mode": ("kvTransferProtocol", "kv_transfer_protocol", "transfer_protocol", "kv_transfer_mode"),
    "max_transfer_concurrency": ("maxTransferConcurrency", "max_transfer_concurrency"),
}
_PART_OF = {name: part for part, names in KEYS.items() for name in names}
ALLOWED_KEYS = ", ".join(names[0] for names in KEYS.values())


@dataclass(frozen=True, slots=True)
class Wish:
    """The parts one channel gives; None = it doesn't say. `requested` is the mode as spelt."""

    channel: str
    mode: CacheMode | None = None
    requested: str | None = None
    chunk_size: int | None = None
    kv_cache_dtype: str | None = None
    enable_prefix_cache: bool | None = None
    prefill_endpoint: str | None = None
    decode_endpoint: str | None = None
    transfer_mode: TransferMode | None = None
    max_transfer_concurrency: int | None = None


def parse_word(value: str, channel: str) -> Wish | None:
    """A mode alone. A blank value says nothing: clients send it for an unset variable."""
    text = value.strip()
    if not text:
        return None
    return Wish(channel, mode=_checked(parse_mode, text, channel), requested=text)


def parse_strategy(value: Any, channel: str) -> Wish | None:
    """A mode, or an object of `KEYS`; null says nothing."""
    if value is None:
        return None
    if isinstance(value, str):
        return parse_word(value, channel)
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{channel} must be a mode or an object with {ALLOWED_KEYS}", param=channel)
    return _parse_object(value, channel)


def parse_query_value(value: str, channel: str) -> Wish | None:
    """As `parse_strategy`; an object is written as JSON."""
    if not value.lstrip().startswith("{"):
        return parse_word(value, channel)
    try:
        parsed = json.loads(value)
    except ValueError:
        raise InvalidRequest(f"{channel} is not valid JSON", param=channel) from None
    return parse_strategy(parsed, channel)


def _parse_object(value: Mapping[str, Any], channel: str) -> Wish:
    parts: dict[str, Any] = {}
    for name, item in value.items():
        part = _PART_OF.get(name)
        if part is None:
            raise InvalidRequest(f"{channel} has an unknown key {_show(name)}; allowed: {ALLOWED_KEYS}", param=channel)
        if item is None:
            continue
        parsed = _PARSERS[part](item, f"{channel}.{name}")
        if parts.setdefault(part, parsed) != parsed:
            raise InvalidRequest(f"{channel}.{name} is given twice, with two values", param=f"{channel}.{name}")
        if part == "mode":
            parts["requested"] = item.strip()
    return Wish(channel, **parts)


def _text(parse: Callable[[str], Any]) -> Callable[[Any, str], Any]:
    def parse_text(value: Any, channel: str) -> Any:
        if not isinstance(value, str):
            raise InvalidRequest(f"{channel} must be text", param=channel)
        return _checked(parse, value, channel)

    return parse_text


def _whole(value: Any, channel: str) -> int:
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not is_whole or value < 1:
        raise InvalidRequest(f"{channel} must be a whole number, at least 1", param=channel)
    return int(value)


def _switch(value: Any, channel: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{channel} must be true or false", param=channel)
    return value


def _checked(parse: Callable[[str], Any], text: str, channel: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise InvalidRequest(f"{channel} {error}, not {_show(text)}", param=channel) from None


def _show(text: str) -> str:
    """What a client sent, short and plain enough for a message."""
    return ascii(text if len(text) <= 40 else f"{text[:40]}...")


_PARSERS: dict[str, Callable[[Any, str], Any]] = {
    "mode": _text(parse_mode),
    "chunk_size": _whole,
    "kv_cache_dtype": _text(parse_kv_dtype),
    "enable_prefix_cache": _switch,
    "prefill_endpoint": _text(str.strip),
    "decode_endpoint": _text(str.strip),
    "transfer_mode": _text(parse_transfer),
    "max_transfer_concurrency": _whole,
}
