"""Where the keys of a TOML file stand."""

from __future__ import annotations

import tomli

from gateway.settings.lines import key_lines

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
