"""The same prompts in both modes: how the figures differ, and whether the texts do. Pure.

A pair is (merged, split); differences are split less merged, in seconds or tokens per second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from gateway.bench.bootstrap import Difference, paired_difference
from gateway.bench.percentiles import percentile
from gateway.bench.rows import RequestRow

RowPair = tuple[RequestRow, RequestRow]


class TextEquality(Struct, kw_only=True, frozen=True):
    """Whether both modes wrote the same. Positions are characters, from 0."""

    num_equal: int
    num_pairs: int
    first_round_index: int | None = None
    first_index: int | None = None
    first_position: int | None = None


def paired_rows(first: Iterable[RequestRow], second: Iterable[RequestRow]) -> list[RowPair]:
    """The same prompt in both modes, where both were answered in full; in order of round and index."""
    others = {(row.round_index, row.index): row for row in second if row.is_ok}
    pairs = [(row, others.get((row.round_index, row.index))) for row in first if row.is_ok]
    found = [(row, other) for row, other in pairs if other is not None]
    return sorted(found, key=lambda pair: (pair[0].round_index, pair[0].index))


def differences(pairs: Sequence[RowPair], *, seed: int) -> dict[str, Difference | None]:
    """Figure by figure."""

    def of(value: Callable[[RequestRow], float | None], share: float) -> Difference | None:
        known = [(a, b) for a, b in ((value(one), value(two)) for one, two in pairs) if a is not None and b is not None]
        return paired_difference(known, lambda values: percentile(values, share), seed=seed)

    return {
        "ttft_p50_seconds": of(lambda row: row.ttft_seconds, 50),
        "ttft_p95_seconds": of(lambda row: row.ttft_seconds, 95),
        "tpot_p50_seconds": of(lambda row: row.tpot_seconds, 50),
        "tpot_p95_seconds": of(lambda row: row.tpot_seconds, 95),
        "end_to_end_p50_seconds": of(lambda row: row.end_to_end_seconds, 50),
        "request_tokens_per_second": paired_difference(pairs, tokens_per_second, seed=seed),
    }


def tokens_per_second(rows: Sequence[RequestRow]) -> float:
    """Output tokens by the time the requests took, end to end: the rate one client sees."""
    seconds = sum(row.end_to_end_seconds or 0.0 for row in rows)
    return sum(row.completion_tokens for row in rows) / seconds if seconds > 0 else 0.0


def compare_texts(pairs: Sequence[RowPair]) -> TextEquality:
    unequal = [(one, two) for one, two in pairs if one.text != two.text]
    equality = TextEquality(num_equal=len(pairs) - len(unequal), num_pairs=len(pairs))
    if not unequal:
        return equality
    one, two = unequal[0]
    return TextEquality(
        num_equal=equality.num_equal,
        num_pairs=equality.num_pairs,
        first_round_index=one.round_index,
        first_index=one.index,
        first_position=first_difference(one.text, two.text),
    )


def first_difference(one: str, two: str) -> int | None:
    """Position of the first character that differs; the end of the shorter text counts as one."""
    if one == two:
        return None
    same = zip(one, two, strict=False)
    return next((position for position, (a, b) in enumerate(same) if a != b), min(len(one), len(two)))
