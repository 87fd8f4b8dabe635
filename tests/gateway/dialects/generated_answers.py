"""Answers as the rest of the gateway hands them to a dialect: their deltas, made up or written out, and the whole.

Knows no dialect: what a client reads of them is the business of each dialect's own helpers and tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from gateway.core.types import ChoiceAnswer, Delta, FinishReason, ReasoningDelta, TextDelta, ToolCall, ToolCallDelta

# A segment is a kind, its whole text, and where its deltas are cut.
Segment = tuple[str, str, list[int]]

CHARACTERS = st.characters(exclude_categories=["Cs"])
TEXTS = st.text(CHARACTERS, min_size=1, max_size=30)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(CHARACTERS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=6), JSON, max_size=3).map(
    lambda value: json.dumps(value, ensure_ascii=False)
)
ODD_ARGUMENTS = ("", "  ", "null", "[1]", '"x"', "3", "no json", '\n {"a": "\\u00e9\\u2028"} ')
CUTS = st.lists(st.integers(0, 30), max_size=4)
ENDS = st.sampled_from(
    [(FinishReason.STOP, None), (FinishReason.LENGTH, None), (FinishReason.TOOL_CALLS, None), (FinishReason.STOP, "##")]
)


def some_segments(*more_arguments: str) -> st.SearchStrategy[list[Segment]]:
    """Segments in any order; arguments of calls are objects, odd, or one of `more_arguments`."""
    arguments = OBJECTS | st.sampled_from([*ODD_ARGUMENTS, *more_arguments])
    segment: st.SearchStrategy[Segment] = st.one_of(
        st.tuples(st.just("text"), TEXTS, CUTS),
        st.tuples(st.just("thought"), TEXTS, CUTS),
        st.tuples(st.just("call"), arguments, CUTS),
    )
    return st.lists(segment, max_size=6)


def text(value: str, index: int = 0) -> TextDelta:
    return TextDelta(value, 1, index)


def thought(value: str, num_tokens: int = 1) -> ReasoningDelta:
    return ReasoningDelta(value, num_tokens)


def call(number: int, name: str = "", arguments: str = "", call_id: str | None = None) -> ToolCallDelta:
    return ToolCallDelta(0, number, f"call_{number}" if call_id is None else call_id, name, arguments)


def pieces(value: str, cuts: Sequence[int]) -> list[str]:
    """`value` cut at `cuts`; some pieces are empty."""
    edges = [0, *sorted(min(cut, len(value)) for cut in cuts), len(value)]
    return [value[start:stop] for start, stop in pairwise(edges)]


def deltas_of(segments: Sequence[Segment]) -> Iterator[Delta]:
    number = -1
    for kind, value, cuts in segments:
        first, *rest = pieces(value, cuts)
        if kind == "call":
            number += 1
            yield call(number, "f", first)
            yield from (call(number, arguments=piece) for piece in rest)
        else:
            make = text if kind == "text" else thought
            yield from map(make, [first, *rest])


def uncut(segments: Sequence[Segment]) -> list[Segment]:
    return [(kind, value, []) for kind, value, _ in segments]


def all_said(segments: Sequence[Segment], kind: str) -> str:
    """All that the segments of one kind say, joined."""
    return "".join(value for segment, value, _ in segments if segment == kind)


def choice_of(
    deltas: Iterable[Delta], reason: FinishReason = FinishReason.STOP, stop_reason: str | int | None = None
) -> ChoiceAnswer:
    """The same answer in one piece."""
    choice = ChoiceAnswer(0, reason=reason, stop_reason=stop_reason)
    for delta in deltas:
        match delta:
            case TextDelta():
                choice.text += delta.text
            case ReasoningDelta():
                choice.reasoning += delta.text
                choice.num_reasoning_tokens += delta.num_tokens
            case ToolCallDelta():
                if delta.name:
                    choice.calls.append(ToolCall(delta.call_id, delta.name))
                choice.calls[-1].arguments += delta.arguments
    return choice
