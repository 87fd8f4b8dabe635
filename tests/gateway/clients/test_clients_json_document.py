"""JSON with comments is edited in place: what is not ours keeps every character."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.clients.document import MISSING, DocumentError, value_at
from gateway.clients.json_document import JsonDocument

COMMENTED = """\
// my settings
{
  "a": 1, // one
  /* two */
  "inner": {"x": [1, 2,], "y": null},
  "last": "z" // end
}
"""


def test_a_value_is_put_at_the_end_and_all_comments_stay():
    document = JsonDocument(COMMENTED)
    document.set(("new", "deep"), True)
    assert document.text == COMMENTED.replace(
        '"last": "z" // end\n', '"last": "z", // end\n  "new": {\n    "deep": true\n  }\n'
    )


def test_a_value_is_replaced_where_it_stands():
    document = JsonDocument(COMMENTED)
    document.set(("a",), 2)
    document.set(("inner", "z"), "w")
    assert '"a": 2, // one' in document.text
    assert '"inner": {"x": [1, 2,], "y": null, "z": "w"},' in document.text


def test_what_was_put_is_taken_out_without_a_trace():
    document = JsonDocument(COMMENTED)
    document.set(("new",), {"k": [1]})
    document.set(("inner", "z"), 1)
    document.remove(("inner", "z"))
    document.remove(("new",))
    assert document.text == COMMENTED


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('{"a": 1, "b": 2}', '{ "b": 2}'),
        ('{"b": 2, "a": 1}', '{"b": 2}'),
        ('{\n  "a": 1,\n  "b": 2\n}', '{\n  "b": 2\n}'),
        ('{\n  "b": 2,\n  "a": 1\n}', '{\n  "b": 2\n}'),
        ('{\n  "b": 2,\n  "a": 1,\n}', '{\n  "b": 2,\n}'),
        ('{\n  "b": 2, // kept\n  "a": 1 // goes\n}', '{\n  "b": 2 // kept\n // goes\n}'),
        ('{"a": 1}', "{}"),
        ('{"a": 1, "b": 2, "a": 3}', '{ "b": 2}'),
    ],
)
def test_a_member_goes_with_its_comma_and_line(text: str, left: str):
    document = JsonDocument(text)
    document.remove(("a",))
    assert json.loads(json.dumps(document.plain())) == dict.fromkeys(document.plain(), 2)
    assert document.text == left


def test_an_empty_file_and_an_empty_object_with_a_comment_are_filled():
    fresh = JsonDocument("")
    fresh.set(("a", "b"), 1)
    assert fresh.text == '{\n  "a": {\n    "b": 1\n  }\n}\n'
    commented = JsonDocument("{\n  // nothing yet\n}\n")
    commented.set(("a",), 1)
    assert commented.text == '{\n  // nothing yet\n  "a": 1\n}\n'


@pytest.mark.parametrize(
    "text", ["[1]", "{", '{"a" 1}', '{"a": 1} x', '{"a": nope}', '{"a": NaN}', "/* open", '{"a": "b', "[" * 5000, "3"]
)
def test_what_is_no_json_object_is_refused_without_quoting_it(text: str):
    with pytest.raises(DocumentError) as refusal:
        JsonDocument(text)
    assert "nope" not in str(refusal.value)


def test_a_place_taken_by_something_else_is_refused():
    with pytest.raises(DocumentError, match="env holds something else"):
        JsonDocument('{"env": "x"}').set(("env", "A"), "1")


NAMES = st.text(st.sampled_from('ab"/\\ü{},:* \n'), min_size=1, max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('ab"/\\ü{},:*\n'), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
BLANKS = st.sampled_from(["", " ", "\n", "\n  ", " // c, }\n", "/* { */", "\n\t"])


@st.composite
def jsonc(draw: st.DrawFn, value: object) -> str:
    """The value with blanks and comments anywhere, and trailing commas."""

    def written(one: object) -> str:
        if isinstance(one, dict):
            parts = [f"{draw(BLANKS)}{json.dumps(k)}{draw(BLANKS)}:{written(v)}" for k, v in one.items()]
            return "{" + ",".join(parts) + (draw(st.sampled_from(["", ","])) if parts else "") + draw(BLANKS) + "}"
        if isinstance(one, list):
            return "[" + ",".join(written(v) for v in one) + draw(BLANKS) + "]"
        return draw(BLANKS) + json.dumps(one) + draw(BLANKS)

    return draw(BLANKS) + written(value) + draw(BLANKS)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.data())
def test_any_value_can_be_put_into_any_file_and_taken_out_again(data: st.DataObject):
    before = data.draw(st.dictionaries(NAMES, VALUES, max_size=4))
    text = data.draw(jsonc(before))
    path = tuple(data.draw(st.lists(NAMES, min_size=1, max_size=2)))
    document = JsonDocument(text)
    assert document.plain() == before
    if len(path) == 2 and value_at(before, path[:1]) is not MISSING and not isinstance(before[path[0]], dict):
        with pytest.raises(DocumentError):
            document.set(path, 1)
        return
    value = data.draw(VALUES)
    document.set(path, value)
    assert value_at(document.plain(), path) == value
    document.remove(path)
    assert value_at(document.plain(), path) is MISSING
    others = {name: one for name, one in document.plain().items() if name != path[0]}
    assert others == {name: one for name, one in before.items() if name != path[0]}
