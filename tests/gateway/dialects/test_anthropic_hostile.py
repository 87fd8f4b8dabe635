"""Bodies with anything anywhere: each is read, or refused by the client's own name of what is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import InvalidRequest
from gateway.dialects.anthropic_messages import parse, to_chat
from gateway.dialects.sampling import Defaults

FULL: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "S"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "system", "content": "later"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": [1]}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "is_error": False,
                    "content": [{"type": "text", "text": "r"}],
                },
                {
                    "type": "document",
                    "title": "T",
                    "source": {"type": "content", "content": [{"type": "text", "text": "d"}]},
                },
                {"type": "search_result", "title": "T", "source": "s", "content": [{"type": "text", "text": "d"}]},
            ],
        },
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "stop_sequences": ["x"],
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "metadata": {"user_id": "u"},
    "thinking": {"type": "enabled", "budget_tokens": 2000},
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    "chat_template_kwargs": {"x": 1},
    "seed": 1,
}


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place below `value`."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


ANYTHING = st.recursive(
    st.sampled_from(
        [None, True, 0, -1, 1.5, 2**70, "", "x", "text", "tool_use", "tool_result", "image", "auto", "system"]
    ),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "text", "a"]), inner, max_size=2)
    ),
    max_leaves=4,
)


def changed(path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    body = copy.deepcopy(FULL)
    holder: Any = body
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return body


def refusal(attempt: Callable[[], object]) -> InvalidRequest | None:
    try:
        attempt()
    except InvalidRequest as error:
        return error
    return None


def test_the_body_that_is_changed_below_is_valid_itself() -> None:
    assert parse(FULL, Defaults()).notices
    assert to_chat(FULL).fields["messages"]


@settings(derandomize=True, max_examples=500, deadline=None)
@given(st.sampled_from(list(places(FULL))), ANYTHING)
@pytest.mark.parametrize("read", [lambda body: parse(body, Defaults()), to_chat], ids=["local", "upstream"])
def test_anything_anywhere_is_read_or_refused_by_name(read: Any, path: tuple[str | int, ...], value: Any) -> None:
    error = refusal(lambda: read(changed(path, value)))

    if error is not None:
        named = str(error.param).partition(".")[0].partition("[")[0]
        # without the tools that were there, it is the choice of one that is wrong
        assert named == path[0] or (path[0], named) == ("tools", "tool_choice")
        assert f"`{named}" in error.message
