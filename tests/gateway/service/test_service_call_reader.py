"""Forced calls, read while they are written."""

from __future__ import annotations

import itertools
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.service.call_reader import CallReader, call_id

FIXED = settings(max_examples=100, derandomize=True, deadline=None)
keys = st.text(max_size=4)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)),
    max_leaves=8,
)
call = st.tuples(st.sampled_from(["f", "get_weather", "größe-2"]), st.dictionaries(keys, json_values, max_size=3))
calls_strategy = st.lists(call, min_size=1, max_size=4)


def written(calls, *, as_array: bool, ascii_only: bool) -> str:
    def dumps(value):
        return json.dumps(value, ensure_ascii=ascii_only, separators=(",", ":"))

    texts = [f'{{"name":"{name}","arguments":{dumps(arguments)}}}' for name, arguments in calls]
    return "[" + ",".join(texts) + "]" if as_array else texts[0]


def read(pieces: list[str]) -> list[tuple[str, str, str]]:
    reader = CallReader("r", 0)
    found: list[list[str]] = []
    for piece in pieces:
        for delta in reader.push(piece):
            if delta.name:
                assert delta.call == len(found)
                found.append([delta.call_id, delta.name, ""])
            assert delta.call == len(found) - 1
            found[-1][2] += delta.arguments
    return [tuple(call) for call in found]


@given(calls_strategy, st.booleans(), st.booleans(), st.lists(st.integers(0, 400), max_size=20))
@FIXED
def test_calls_are_the_same_however_the_text_is_cut(calls, as_array, ascii_only, cuts):
    calls = calls if as_array else calls[:1]
    text = written(calls, as_array=as_array, ascii_only=ascii_only)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:stop] for start, stop in itertools.pairwise(edges)]
    found = read(pieces)
    assert [(name, json.loads(arguments)) for _, name, arguments in found] == calls
    assert found == read(list(text)) == read([text])
    assert [identity for identity, _, _ in found] == [call_id("r", 0, number) for number in range(len(calls))]


@given(calls_strategy, st.integers(0, 400))
@FIXED
def test_text_that_breaks_off_gives_what_is_there(calls, length):
    whole = read([written(calls, as_array=True, ascii_only=False)])
    part = read([written(calls, as_array=True, ascii_only=False)[:length]])
    assert [call[:2] for call in part] == [call[:2] for call in whole[: len(part)]]
    assert all(all_of[2].startswith(some[2]) for some, all_of in zip(part, whole, strict=False))


@given(st.text(max_size=200))
@FIXED
def test_tc_12_no_text_breaks_it(text):
    read([text])
    read(list(text))
