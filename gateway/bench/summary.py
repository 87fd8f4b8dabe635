"""Figures out of raw rows: one summary per mode, and what sets two modes apart. Pure.

Only requests that were answered in full enter a figure. Where nobody knows a value it is None, never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from backends.protocol.messages import Timings
from gateway.bench.bootstrap import Difference
from gateway.bench.pairs import TextEquality, compare_texts, differences, paired_rows
from gateway.bench.percentiles import percentile, percentile_or_none
from gateway.bench.rows import Comparison, PassResult, Peaks, RequestRow, roles_of
from gateway.core.types import CacheMode


class Breakdown(Struct, kw_only=True, frozen=True):
    """Medians over requests, in seconds, as the engine saw them."""

    queue_seconds: float
    prefill_seconds: float
    transfer_seconds: float
    decode_wait_seconds: float
    decode_seconds_per_token: float | None


class Transfers(Struct, kw_only=True, frozen=True):
    """KV moved between instances, summed over requests."""

    num_bytes: int
    seconds: float
    overlapped_share: float | None  # of the seconds; None where nothing was moved


class ModeSummary(Struct, kw_only=True, frozen=True):
    """One column of the table."""

    mode: CacheMode
    num_ok: int
    num_failed: dict[str, int]  # outcome -> requests
    num_not_sent: int  # given up because a warm-up or priming request failed
    errors: dict[str, int]  # message -> requests or passes
    ttft_p50_seconds: float | None
    ttft_p95_seconds: float | None
    tpot_p50_seconds: float | None
    tpot_p95_seconds: float | None
    end_to_end_p50_seconds: float | None
    output_tokens_per_second: float | None
    request_tokens_per_second: float | None  # of one request, end to end
    total_tokens_per_second: float | None
    peaks: dict[str, Peaks]  # role -> highest over all rounds
    peak_memory_bytes: int | None  # sum over processes
    prefix_hit_rate: float | None
    transfers: Transfers | None
    breakdown: Breakdown | None
    client_wait_p95_seconds: float | None
    client_cpu_share: float | None  # CPU seconds of this client per second of wall time

    @property
    def has_failed(self) -> bool:
        return self.num_ok == 0 or bool(self.errors)


class Summary(Struct, kw_only=True, frozen=True):
    modes: list[ModeSummary]
    differences: dict[str, Difference | None] = {}  # figure -> split less merged, whatever the order of modes
    texts: TextEquality | None = None

    @property
    def is_clean(self) -> bool:
        """Whether every request of every mode was answered in full."""
        return not any(mode.has_failed for mode in self.modes)


def summarise(comparison: Comparison, modes: Sequence[CacheMode], *, seed: int) -> Summary:
    """Everything the report shows."""
    columns = [summarise_mode(mode, [one for one in comparison.passes if one.mode == mode]) for mode in modes]
    if set(modes) != {CacheMode.MERGED, CacheMode.SPLIT}:
        return Summary(modes=columns)
    pairs = paired_rows(comparison.rows(CacheMode.MERGED), comparison.rows(CacheMode.SPLIT))
    return Summary(modes=columns, differences=differences(pairs, seed=seed), texts=compare_texts(pairs))


def summarise_mode(mode: CacheMode, passes: Sequence[PassResult]) -> ModeSummary:
    rows = [row for one in passes for row in one.rows]
    good = [row for row in rows if row.is_ok]
    wall_seconds = sum(one.wall_seconds for one in passes)
    peaks = highest_peaks(passes)
    num_output_tokens = sum(row.completion_tokens for row in good)
    num_tokens = num_output_tokens + sum(row.prompt_tokens for row in good)
    errors = Counter(row.error for row in rows if not row.is_ok)
    errors.update(one.failure for one in passes if one.failure)
    return ModeSummary(
        mode=mode,
        num_ok=len(good),
        num_failed=dict(Counter(str(row.outcome) for row in rows if not row.is_ok)),
        num_not_sent=sum(one.num_not_sent for one in passes),
        errors=dict(errors),
        ttft_p50_seconds=percentile_or_none((row.ttft_seconds for row in good), 50),
        ttft_p95_seconds=percentile_or_none((row.ttft_seconds for row in good), 95),
        tpot_p50_seconds=percentile_or_none((row.tpot_seconds for row in good), 50),
        tpot_p95_seconds=percentile_or_none((row.tpot_seconds for row in good), 95),
        end_to_end_p50_seconds=percentile_or_none((row.end_to_end_seconds for row in good), 50),
        output_tokens_per_second=_rate(num_output_tokens, wall_seconds),
        request_tokens_per_second=_rate(num_output_tokens, sum(row.end_to_end_seconds or 0.0 for row in good)),
        total_tokens_per_second=_rate(num_tokens, wall_seconds),
        peaks=peaks,
        peak_memory_bytes=memory_in_all(mode, peaks),
        prefix_hit_rate=prefix_hit_rate(good),
        transfers=transfers(good),
        breakdown=breakdown(good),
        client_wait_p95_seconds=percentile_or_none((r.sent_at_seconds - r.intended_at_seconds for r in good), 95),
        client_cpu_share=_rate(sum(one.client_cpu_seconds for one in passes), wall_seconds),
    )


def highest_peaks(passes: Iterable[PassResult]) -> dict[str, Peaks]:
    """The highest of each process over the passes of one mode; processes of the other mode are left out."""
    found: dict[str, list[Peaks]] = {}
    for one in passes:
        for role in roles_of(one.mode):
            if role in one.peaks:
                found.setdefault(role, []).append(one.peaks[role])
    return {
        role: Peaks(
            memory_bytes=_max(peak.memory_bytes for peak in peaks),
            kv_blocks=_max(peak.kv_blocks for peak in peaks),
            num_blocks=_max(peak.num_blocks for peak in peaks),
        )
        for role, peaks in found.items()
    }


def memory_in_all(mode: CacheMode, peaks: Mapping[str, Peaks]) -> int | None:
    """The sum, if every process is known: a partial sum would look like a smaller total."""
    known = [peaks[role].memory_bytes for role in roles_of(mode) if role in peaks]
    parts = [part for part in known if part is not None]
    return sum(parts) if len(parts) == len(roles_of(mode)) else None


def prefix_hit_rate(rows: Iterable[RequestRow]) -> float | None:
    """Cached prompt tokens by prompt tokens, of the requests that say."""
    known = [(row.cached_tokens, row.prompt_tokens) for row in rows if row.cached_tokens is not None]
    return _rate(sum(cached for cached, _ in known), sum(total for _, total in known))


def transfers(rows: Iterable[RequestRow]) -> Transfers | None:
    timings = [row.timings for row in rows if row.timings is not None]
    if not timings:
        return None
    seconds = sum(timing.transfer_seconds for timing in timings)
    return Transfers(
        num_bytes=sum(timing.transfer_bytes for timing in timings),
        seconds=seconds,
        overlapped_share=_rate(sum(timing.transfer_overlapped_seconds for timing in timings), seconds),
    )


def breakdown(rows: Iterable[RequestRow]) -> Breakdown | None:
    """Medians of the phases of those requests that have a record."""
    known = [(row.timings, row.completion_tokens) for row in rows if row.timings is not None]
    if not known:
        return None

    def median(phase: Callable[[Timings], float]) -> float:
        return percentile([phase(timing) for timing, _ in known], 50)

    per_token = [timing.decode_seconds / (num_tokens - 1) for timing, num_tokens in known if num_tokens > 1]
    return Breakdown(
        queue_seconds=median(lambda timing: timing.queue_seconds),
        prefill_seconds=median(lambda timing: timing.prefill_seconds),
        transfer_seconds=median(lambda timing: timing.transfer_seconds),
        decode_wait_seconds=median(lambda timing: timing.decode_wait_seconds),
        decode_seconds_per_token=percentile_or_none(per_token, 50),
    )


def _rate(amount: float, per: float) -> float | None:
    return amount / per if per > 0 else None


def _max(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
