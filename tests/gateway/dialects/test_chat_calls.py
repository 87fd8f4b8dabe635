"""Tool calls as servers really send them come out one after another, whole, each with an id of its own."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dialects.chat_calls import CallOrder

X1, X2 = '{"x": 1}', '{"x": 2}'


def piece(index=None, call_id=None, name=None, arguments=None):
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    found = {"index": index, "id": call_id, "type": "function", "function": function}
    return {key: value for key, value in found.items() if value is not None}


def read(*pieces):
    """(id, name, arguments) of each call; fails if calls interleave."""
    order = CallOrder("r" * 32, 0)
    deltas = [delta for entry in pieces for delta in order.push(entry)] + order.finish()
    calls: list[list[str]] = []
    for delta in deltas:
        if delta.name:
            assert delta.call == len(calls), "a call begins with the next number"
            calls.append([delta.call_id, delta.name, ""])
        assert delta.call == len(calls) - 1, "calls never interleave"
        assert delta.call_id == calls[-1][0]
        calls[-1][2] += delta.arguments
    ids = [call_id for call_id, _, _ in calls]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    return [tuple(call) for call in calls]


def named(*pieces):
    return [call[1:] for call in read(*pieces)]


def test_tc_01_two_calls_under_one_index_are_two_calls():
    assert read(piece(0, "a", "f", X1), piece(0, "b", "f", X2)) == [("a", "f", X1), ("b", "f", X2)]


def test_tc_10_arguments_as_an_object_become_a_string():
    assert named(piece(0, "a", "f", {"x": 1}), piece(0, "b", "g", {})) == [("f", '{"x":1}'), ("g", "{}")]


def test_tc_01_calls_without_an_index_begin_with_their_name():
    calls = (piece(None, "a", "f", '{"x"'), piece(arguments=": 1}"), piece(None, "b", "g", X2))
    assert read(*calls) == [("a", "f", X1), ("b", "g", X2)]


@pytest.mark.parametrize("call_id", ["", None, "0"])
def test_tc_02_ids_that_are_empty_missing_or_the_same_are_replaced(call_id):
    calls = read(piece(0, call_id, "f", X1), piece(0, call_id, "g", X2))
    assert [call[1:] for call in calls] == [("f", X1), ("g", X2)]


def test_tc_02_an_id_and_name_that_are_repeated_go_on_with_their_call():
    calls = read(piece(0, "a", "f", ""), piece(0, "a", "f", '{"x"'), piece(0, "a", "", ": 1}"), piece(0, "a", None, ""))
    assert calls == [("a", "f", X1)]


def test_tc_02_a_second_call_of_the_same_name_without_ids_begins_when_the_first_is_whole():
    assert named(piece(0, "", "f", '{"x"'), piece(0, "", "f", ": 1}"), piece(0, "", "f", X2)) == [("f", X1), ("f", X2)]


def test_tc_02_a_name_that_comes_late_holds_back_its_call():
    assert named(piece(0, "a"), piece(0, arguments='{"x"'), piece(0, name="f"), piece(0, arguments=": 1}")) == [
        ("f", X1)
    ]


def test_a_late_id_does_not_begin_another_call():
    assert named(piece(0, None, "f", '{"x"'), piece(0, "late", "f", ": 1}")) == [("f", X1)]


def test_pieces_of_two_calls_in_turn_are_told_apart():
    calls = (piece(0, "a", "f"), piece(1, "b", "g"), piece(0, arguments='{"x"'), piece(1, arguments='{"x"'),
             piece(0, arguments=": 1}"), piece(1, arguments=": 2}"))  # fmt: skip
    assert read(*calls) == [("a", "f", X1), ("b", "g", X2)]


def test_the_second_call_streams_as_soon_as_the_first_is_whole():
    order = CallOrder("r", 0)
    order.push(piece(0, "a", "f", X1))
    assert [delta.arguments for delta in order.push(piece(1, "b", "g", '{"x"'))] == ['{"x"']


def test_tc_09_calls_without_arguments_are_calls():
    assert named(piece(0, "a", "f", ""), piece(1, "b", "g", None)) == [("f", ""), ("g", "")]


@pytest.mark.parametrize("junk", [None, 3, "x", [], {}, {"function": 3}, {"index": "0"}, {"index": True, "id": 5}])
def test_what_is_no_call_is_nothing(junk):
    order = CallOrder("r", 0)
    assert order.push(junk) + order.finish() == []
    assert not order.seen


ARGUMENTS = st.dictionaries(st.text(max_size=3), st.text(max_size=5) | st.integers(), max_size=3).map(json.dumps)


@given(st.lists(ARGUMENTS, min_size=1, max_size=4), st.data())
@settings(max_examples=60, derandomize=True, deadline=None)
def test_tc_01_any_cut_in_any_order_gives_the_same_calls(wanted, data):
    """Each call's pieces keep their order; those of different calls mix in any way."""
    queues = []
    for index, arguments in enumerate(wanted):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(arguments)), max_size=3)))
        parts = [arguments[a:b] for a, b in zip([0, *cuts], [*cuts, len(arguments)], strict=True)]
        queues.append([piece(index, f"id{index}", f"f{index}", "")] + [piece(index, arguments=part) for part in parts])
    pieces = []
    while any(queues):
        queue = data.draw(st.sampled_from([queue for queue in queues if queue]))
        pieces.append(queue.pop(0))

    assert sorted(read(*pieces)) == [(f"id{index}", f"f{index}", text) for index, text in enumerate(wanted)]
