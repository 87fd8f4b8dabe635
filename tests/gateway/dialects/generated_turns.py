"""Made-up conversations, and what must hold of their prompts: each begins the next, and what was said comes back.

Knows no dialect: how a turn is said and sent back is the business of each dialect's own tests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from gateway.core.types import ChoiceAnswer, FinishReason, ToolCall

Call = tuple[str, dict[str, Any]]
Turn = tuple[str, str, list[Call]]  # reasoning, text, calls

CHARACTERS = st.characters(exclude_categories=["Cs"])
TEXTS = st.text(CHARACTERS, min_size=1, max_size=12)
VALUES: st.SearchStrategy[Any] = st.one_of(TEXTS, st.integers(-99, 99), st.booleans(), st.lists(TEXTS, max_size=2))
INPUTS = st.dictionaries(TEXTS, VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(["read", "a.b"]), INPUTS), max_size=2)
TURNS = st.lists(st.tuples(st.text(CHARACTERS, max_size=6), TEXTS, CALLS), min_size=2, max_size=10)


def answer_in(turn: Turn, number: int) -> ChoiceAnswer:
    """What the model says in the turn of this number."""
    reasoning, text, calls = turn
    made = [ToolCall(f"t{number}_{i}", name, json.dumps(value)) for i, (name, value) in enumerate(calls)]
    return ChoiceAnswer(0, text, reasoning, calls=made, reason=FinishReason.STOP)


def assert_each_begins_the_next(prompts: Sequence[Sequence[dict[str, Any]]]) -> None:
    for earlier, later in pairwise(prompts):
        assert len(earlier) < len(later)
        assert json.dumps(later[: len(earlier)]) == json.dumps(earlier)  # the order of keys too


def assert_it_said(messages: Sequence[dict[str, Any]], turns: Sequence[Turn]) -> None:
    """The model's own messages are those of the turns, but for the last, which nobody has answered yet."""
    own = [message for message in messages if message["role"] == "assistant"]
    for message, (reasoning, text, calls) in zip(own, turns[:-1], strict=True):
        assert message["content"] == text
        assert message.get("reasoning_content", "") == reasoning
        functions = [call["function"] for call in message.get("tool_calls", [])]
        assert [(f["name"], json.loads(f["arguments"])) for f in functions] == calls
