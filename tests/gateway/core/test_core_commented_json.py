"""JSON with comments means what JSON means, and what is malformed is refused where it is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.commented_json import CommentedJsonError, line_at, parse_object

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(derandomize=True, max_examples=100)
@given(st.dictionaries(st.text(), JSON_VALUES, max_size=4))
def test_plain_json_means_what_json_means(value):
    assert parse_object(json.dumps(value, indent=1)).value == value


def test_comments_and_trailing_commas_are_allowed_where_an_editor_allows_them():
    text = '// a\n/* b\n */ {"a//b": "/* c */", // d\n "l": [1, /* e */ 2,],\n}\n// end'
    root = parse_object(text)
    assert root.value == {"a//b": "/* c */", "l": [1, 2]}
    assert [line_at(text, member.start) for member in root.members] == [3, 4]


@pytest.mark.parametrize(
    ("text", "line"),
    [("{", 1), ('{\n"a" 1}', 2), ('{"a": 1,, }', 1), ('{"a":\n01}', 2), ('{"a": "x\ny"}', 1), ("[1]", 1),
     ('{"a": nul}', 1), ('{"a": -}', 1), ('{"a": [1 2]}', 1), ('{"a": 1}\n\n}', 3), ("{,}", 1)],
)  # fmt: skip
def test_malformed_json_is_refused_with_its_line(text, line):
    with pytest.raises(CommentedJsonError) as caught:
        parse_object(text)
    assert caught.value.line == line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": NaN}', "expected a value"),
        ('{"a": -Infinity}', "expected a value"),
        ('{"a": ' + "9" * 5000 + "}", "a number is too long"),
        ('{"a": "secret\\q"}', "a string is not valid: Invalid \\\\escape"),
        ('{"a": /* ', "a comment is not closed"),
        ('{"a": ' + "[" * 200, "nested too deeply"),
    ],
)
def test_what_no_json_has_is_refused_by_name_without_quoting_it(text: str, message: str):
    with pytest.raises(CommentedJsonError, match=message) as caught:
        parse_object(text)
    assert "secret" not in str(caught.value)


def test_doubled_members_are_all_there_and_the_last_counts():
    text = '{"a": 1, "b": {"a": 2}, "a": [3]}'
    root = parse_object(text)
    assert [(member.name, text[member.node.start : member.node.end]) for member in root.members] == [
        ("a", "1"),
        ("b", '{"a": 2}'),
        ("a", "[3]"),
    ]
    found = root.find("a")
    assert found is not None
    assert found.node.value == root.value["a"] == [3]
