"""`cache_salt` keeps a request's prefix blocks apart from those of others (KV-14)."""

from __future__ import annotations

import pytest

from gateway.core.errors import InvalidRequest
from gateway.dialects import openai_chat, openai_completions
from gateway.dialects.sampling import Defaults
from gateway.service.answerers import _salt

CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(("dialect", "body"), [(openai_chat, CHAT), (openai_completions, {"prompt": "x"})])
def test_kv_14_a_salt_is_a_string_that_is_not_empty(dialect, body):
    assert dialect.DIALECT.parse({**body, "cache_salt": "mine"}, Defaults()).cache_salt == "mine"
    assert dialect.DIALECT.parse({**body, "cache_salt": None}, Defaults()).cache_salt == ""
    for bad in ("", "x" * 257, 3, ["a"], {}):
        with pytest.raises(InvalidRequest) as refusal:
            dialect.DIALECT.parse({**body, "cache_salt": bad}, Defaults())
        assert refusal.value.param == "cache_salt"


def test_kv_14_no_salt_of_one_key_is_a_salt_of_another():
    names, asked = ["", "a", "ab", "a:b", "1:a:"], ["", "b", ":b", "a:b", "2:ab:"]
    salts = [_salt(name, salt) for name in names for salt in asked]

    assert _salt("team", "") == "team"
    assert len(set(salts)) == len(salts)
