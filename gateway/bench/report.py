"""The table a person reads. Pure: a comparison and its summary in, text out; computes no figure itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gateway.bench.bootstrap import Difference
from gateway.bench.header import heading
from gateway.bench.options import CompareOptions
from gateway.bench.rows import Comparison, roles_of
from gateway.bench.summary import ModeSummary, Summary

LABEL_WIDTH = 34
COLUMN_WIDTH = 16
UNKNOWN = "-"
SHARED_MEMORY = "peak memory is resident memory, in which memory that prefill and decode share counts twice"

Cell = Callable[[ModeSummary], str]


def render(comparison: Comparison, summary: Summary, options: CompareOptions, url: str) -> str:
    """Heading, table, texts, failures, notices: everything that goes to a terminal."""
    parts = [heading(comparison, options, url), table(summary), *failures(summary), texts(summary)]
    if any(process.device == "cpu" for process in comparison.processes.values()):
        parts.append(f"note: {SHARED_MEMORY}")
    parts += [f"notice: {notice}" for notice in comparison.notices]
    return "\n".join(part for part in parts if part) + "\n"


def table(summary: Summary) -> str:
    names = [mode.mode.value for mode in summary.modes]
    title = "split - merged [95 % interval]" if summary.differences else ""
    lines = [_line("", names, title)]
    for label, cell, figure, scale in ROWS:
        note = difference_text(summary.differences.get(figure), scale) if figure in summary.differences else ""
        lines.append(_line(label, [cell(mode) for mode in summary.modes], note))
    return "\n".join(["", *lines, ""])


def _line(label: str, cells: Sequence[str], note: str) -> str:
    columns = "".join(cell.rjust(COLUMN_WIDTH) for cell in cells)
    return f"{label.ljust(LABEL_WIDTH)}{columns}   {note}".rstrip()


def difference_text(difference: Difference | None, scale: float) -> str:
    """The difference in the unit of its row, and whether chance between requests could explain it."""
    if difference is None:
        return UNKNOWN
    value = f"{difference.value * scale:+.2f}"
    if difference.low is None or difference.high is None:
        return f"{value} [no interval from {difference.num_pairs} pairs]"
    interval = f"[{difference.low * scale:+.2f}, {difference.high * scale:+.2f}]"
    return f"{value} {interval}" + ("" if difference.is_clear else " no clear difference")


def failures(summary: Summary) -> Iterable[str]:
    """Each cause once, with how often; a mode without figures is called failed."""
    for mode in summary.modes:
        if mode.num_ok == 0:
            yield f"FAILED: {mode.mode} has no figures"
        for message, count in mode.errors.items():
            yield f"failed in {mode.mode}, {count} x: {message}"


def texts(summary: Summary) -> str:
    equality = summary.texts
    if equality is None:
        return ""
    if equality.num_pairs == 0:
        return "texts: nothing to compare"
    line = f"texts: {equality.num_equal} of {equality.num_pairs} equal"
    if equality.first_index is None or equality.first_round_index is None:
        return line
    where = f"request {equality.first_index} of round {equality.first_round_index + 1}"
    return f"{line}; first difference in {where} at character {equality.first_position}"


def _milliseconds(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{seconds * 1000:.2f}"


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"


def _mebibytes(num_bytes: int | None) -> str:
    return UNKNOWN if num_bytes is None else f"{num_bytes / 2**20:.1f}"


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share * 100:.1f}"


def _requests(mode: ModeSummary) -> str:
    return f"{mode.num_ok} / {sum(mode.num_failed.values())}" + (" FAILED" if mode.num_ok == 0 else "")


def _outcome(name: str) -> Cell:
    return lambda mode: str(mode.num_failed.get(name, 0))


def _process(mode: ModeSummary, role: str, value: Callable[[str], str]) -> str:
    """A cell of one process: blank in a mode that doesn't use it."""
    if role not in roles_of(mode.mode):
        return ""
    return value(role) if role in mode.peaks else UNKNOWN


def _memory(role: str) -> Cell:
    return lambda mode: _process(mode, role, lambda name: _mebibytes(mode.peaks[name].memory_bytes))


def _blocks(role: str) -> Cell:
    def cell(mode: ModeSummary) -> str:
        peaks = mode.peaks.get(role)
        if peaks is None or peaks.kv_blocks is None:
            return _process(mode, role, lambda _: UNKNOWN)
        return f"{peaks.kv_blocks}" + (f" of {peaks.num_blocks}" if peaks.num_blocks else "")

    return cell


def _phase(name: str) -> Cell:
    return lambda mode: _milliseconds(getattr(mode.breakdown, name) if mode.breakdown else None)


# label, cell of one mode, figure of the difference, scale from its unit to the row's
ROWS: Sequence[tuple[str, Cell, str, float]] = (
    ("requests ok / failed", _requests, "", 1),
    ("  errors", _outcome("error"), "", 1),
    ("  aborted", _outcome("aborted"), "", 1),
    ("  timeouts", _outcome("timeout"), "", 1),
    ("  not sent", lambda mode: str(mode.num_not_sent), "", 1),
    ("TTFT p50, ms", lambda mode: _milliseconds(mode.ttft_p50_seconds), "ttft_p50_seconds", 1000),
    ("TTFT p95, ms", lambda mode: _milliseconds(mode.ttft_p95_seconds), "ttft_p95_seconds", 1000),
    ("TPOT p50, ms", lambda mode: _milliseconds(mode.tpot_p50_seconds), "tpot_p50_seconds", 1000),
    ("TPOT p95, ms", lambda mode: _milliseconds(mode.tpot_p95_seconds), "tpot_p95_seconds", 1000),
    ("end to end p50, ms", lambda mode: _milliseconds(mode.end_to_end_p50_seconds), "end_to_end_p50_seconds", 1000),
    ("output tokens/s, all requests", lambda mode: _number(mode.output_tokens_per_second), "", 1),
    (
        "output tokens/s, one request",
        lambda mode: _number(mode.request_tokens_per_second),
        "request_tokens_per_second",
        1,
    ),
    ("total tokens/s, all requests", lambda mode: _number(mode.total_tokens_per_second), "", 1),
    ("peak memory merged, MiB", _memory("merged"), "", 1),
    ("peak memory prefill, MiB", _memory("prefill"), "", 1),
    ("peak memory decode, MiB", _memory("decode"), "", 1),
    ("peak memory in all, MiB", lambda mode: _mebibytes(mode.peak_memory_bytes), "", 1),
    ("peak KV blocks merged", _blocks("merged"), "", 1),
    ("peak KV blocks prefill", _blocks("prefill"), "", 1),
    ("peak KV blocks decode", _blocks("decode"), "", 1),
    ("prefix hit rate, %", lambda mode: _percent(mode.prefix_hit_rate), "", 1),
    ("KV moved, MiB", lambda mode: _mebibytes(mode.transfers.num_bytes if mode.transfers else None), "", 1),
    ("KV transfer, s", lambda mode: _number(mode.transfers.seconds if mode.transfers else None), "", 1),
    (
        "  overlapped with prefill, %",
        lambda mode: _percent(mode.transfers.overlapped_share if mode.transfers else None),
        "",
        1,
    ),
    ("median queue, ms", _phase("queue_seconds"), "", 1),
    ("median prefill, ms", _phase("prefill_seconds"), "", 1),
    ("median transfer, ms", _phase("transfer_seconds"), "", 1),
    ("median decode wait, ms", _phase("decode_wait_seconds"), "", 1),
    ("median decode, ms a token (engine)", _phase("decode_seconds_per_token"), "", 1),
    ("send late p95, ms", lambda mode: _milliseconds(mode.client_wait_p95_seconds), "", 1),
    ("CPU of this client, %", lambda mode: _percent(mode.client_cpu_share), "", 1),
)
