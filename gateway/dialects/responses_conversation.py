"""`previous_response_id` and item references of OpenAI's Responses, replaced by the items they stand for. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from gateway.dialects.base import Lookup
from gateway.dialects.fields import kind, refuse
from gateway.dialects.responses_errors import refuse_coded
from gateway.dialects.responses_items import History

PREFIX = "resp_"
_ITEM_ID = re.compile(
    r"[a-z]+_([0-9a-f]{32})_\d+"
)  # as the renderer makes them: of the answer that the item is part of


def expand(fields: Mapping[str, Any], lookup: Lookup) -> Mapping[str, Any]:
    """The fields with all the history in `input`. Instructions of earlier turns don't carry over, nor do tools."""
    previous, given = fields.get("previous_response_id"), fields.get("input")
    if previous is None and not _has_reference(given):
        return fields
    items = _items(given)
    expanded = {name: value for name, value in fields.items() if name != "previous_response_id"}
    history = History()
    if previous is not None:
        history = _history(previous, lookup)
        if fields.get("conversation") is not None:
            refuse("`previous_response_id` can't be used together with `conversation`.", "previous_response_id")
    once = lru_cache(maxsize=8)(lookup)  # references are mostly to items of the same few answers
    expanded["input"] = [
        *([history] if previous is not None else []),
        *(_resolved(item, f"input[{index}]", history, once) for index, item in enumerate(items)),
    ]
    return expanded


def _has_reference(given: object) -> bool:
    return isinstance(given, list) and any(_is_reference(item) for item in given)


def _is_reference(item: object) -> bool:
    """`type` may be left out of a reference: then there is nothing but the id."""
    return isinstance(item, dict) and (item.get("type") == "item_reference" or item.keys() == {"id"})


def _items(given: object) -> list[Any]:
    if given is None:
        return []
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list):
        refuse(f"`input` must be a string or an array of items, not {kind(given)}.", "input")
    return given


def _history(previous: object, lookup: Lookup) -> History:
    if not isinstance(previous, str):
        refuse(f"`previous_response_id` must be a string, not {kind(previous)}.", "previous_response_id")
    items = lookup(previous)
    if items is None:
        shown = previous[:80] if previous.isprintable() else "?"
        refuse_coded(
            f"Previous response with id '{shown}' not found. It was not stored, or is not kept any more: send the whole"
            " history in `input`.",
            "previous_response_id",
            "previous_response_not_found",
        )
    return History(previous, items)


def _resolved(item: Any, path: str, history: list[Any], lookup: Lookup) -> Any:
    if not _is_reference(item):
        return item
    said = item.get("id")
    if not isinstance(said, str):
        refuse(f"`{path}.id` must be a string, not {kind(said)}.", f"{path}.id")
    answer = _ITEM_ID.fullmatch(said)
    kept = [*history, *(lookup(PREFIX + answer[1]) or ())] if answer else history
    for known in kept:
        if isinstance(known, dict) and known.get("id") == said:
            return known
    return refuse(f"Item with id '{said[:80]}' not found (`{path}`). Send the item itself.", path)
