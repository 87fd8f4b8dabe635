"""The two readers of text: JSON with comments, and lines of TOML keys."""

from __future__ import annotations

import json

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.settings.jsonc import Document, JsoncError, parse_object
from gateway.settings.lines import key_lines


def plain(value):
    if isinstance(value, Document):
        return {member.name: plain(member.value) for member in value.members}
    return [plain(item) for item in value] if isinstance(value, list) else value


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(derandomize=True, max_examples=100)
@given(st.dictionaries(st.text(), JSON_VALUES, max_size=4))
def test_plain_json_means_what_json_means(value):
    assert plain(Document(parse_object(json.dumps(value, indent=1)))) == value


def test_comments_and_trailing_commas_are_allowed_where_an_editor_allows_them():
    text = '// a\n/* b\n */ {"a//b": "/* c */", // d\n "l": [1, /* e */ 2,],\n}\n// end'
    members = parse_object(text)
    assert plain(Document(members)) == {"a//b": "/* c */", "l": [1, 2]}
    assert [member.line for member in members] == [3, 4]


@pytest.mark.parametrize(
    ("text", "line"),
    [("{", 1), ('{\n"a" 1}', 2), ('{"a": 1,, }', 1), ('{"a":\n01}', 2), ('{"a": "x\ny"}', 1), ("[1]", 1),
     ('{"a": nul}', 1), ('{"a": -}', 1), ('{"a": [1 2]}', 1), ('{"a": 1}\n\n}', 3), ("{,}", 1)],
)  # fmt: skip
def test_malformed_json_is_refused_with_its_line(text, line):
    with pytest.raises(JsoncError) as caught:
        parse_object(text)
    assert caught.value.line == line


TOML = '''\
# [not]
top = 1
[a]  # comment
"quoted # key" = "x = y"
b.c = [
  1, # [no]
  "]",
]

text = """
d = 1
[e]
"""
after = {x = 1, y = [2]}
[[list]]
k = 1
[[list]]
k = \'\'\'
\'\'\'
last = 2
[a.b2]
z = "\\"#"
'''


def test_lines_of_toml_keys():
    tomli.loads(TOML)
    assert key_lines(TOML) == {
        ("top",): 2,
        ("a",): 3,
        ("a", "quoted # key"): 4,
        ("a", "b", "c"): 5,
        ("a", "text"): 10,
        ("a", "after"): 14,
        ("list",): 15,
        ("list", 0): 15,
        ("list", 0, "k"): 16,
        ("list", 1): 17,
        ("list", 1, "k"): 18,
        ("list", 1, "last"): 20,
        ("a", "b2"): 21,
        ("a", "b2", "z"): 22,
    }
