"""Which fields of a request become arguments of litellm, and what is said of the others."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import InvalidRequest
from gateway.upstreams.litellm_sdk.request import Provider, arguments

HI = [{"role": "user", "content": "hi"}]
ALIKE = Provider("groq", frozenset({"temperature", "max_tokens", "tools", "n"}), passes_any_field=True)
OTHER = Provider("anthropic", frozenset({"temperature", "max_tokens", "tools", "user"}), passes_any_field=False)
# What litellm would take for its own: addresses, keys, switches.
DANGEROUS = (
    "api_base", "base_url", "api_key", "api_version", "organization", "custom_llm_provider", "mock_response",
    "extra_headers", "headers", "metadata", "callbacks", "fallbacks", "model_list", "caching", "timeout", "num_retries",
    "aws_access_key_id", "vertex_credentials", "azure_ad_token", "client", "logger_fn", "litellm_params",
)  # fmt: skip


def test_fields_of_the_api_become_arguments():
    asked = arguments({"messages": HI, "temperature": 0.5, "top_k": 3, "stream": True, "model": "m"}, OTHER)
    assert asked.values == {"messages": HI, "temperature": 0.5, "top_k": 3}
    assert asked.notices == ()


def test_null_and_what_happens_anyway_are_not_asked_for():
    fields = {"messages": HI, "n": 1, "logprobs": False, "logit_bias": {}, "stop": None, "seed": None}
    assert arguments(fields, OTHER).values == {"messages": HI}


@pytest.mark.parametrize("name", DANGEROUS)
def test_no_field_of_a_client_is_an_argument_that_only_the_settings_may_say(name):
    for provider in (ALIKE, OTHER):
        values = arguments({"messages": HI, name: "x"}, provider).values
        assert name not in values
        assert values.get("extra_body", {}) == ({name: "x"} if provider is ALIKE else {})


def test_rv_16_unknown_fields_go_into_the_body_of_a_server_of_the_same_api():
    asked = arguments({"messages": HI, "chat_template_kwargs": {"a": 1}}, ALIKE)
    assert asked.values["extra_body"] == {"chat_template_kwargs": {"a": 1}}
    assert asked.notices == ()


def test_elsewhere_unknown_fields_have_no_effect_and_that_is_said():
    asked = arguments({"messages": HI, "chat_template_kwargs": {}, "foo": 1}, OTHER)
    assert "extra_body" not in asked.values
    assert asked.notices == ("provider anthropic: chat_template_kwargs, foo is unknown there and has no effect",)


def test_rv_17_extra_body_is_refused():
    with pytest.raises(InvalidRequest, match="`extra_body`") as raised:
        arguments({"messages": HI, "extra_body": {}}, ALIKE)
    assert raised.value.param == "extra_body"


def test_what_changes_the_answer_is_refused_where_it_is_not_taken():
    with pytest.raises(InvalidRequest, match="does not take n, logit_bias") as raised:
        arguments({"messages": HI, "n": 2, "logit_bias": {"1": 1}}, OTHER)
    assert raised.value.param == "n"


def test_what_only_advises_is_left_out_with_a_notice():
    asked = arguments({"messages": HI, "seed": 1, "user": "u"}, OTHER)
    assert asked.values == {"messages": HI, "user": "u"}
    assert asked.notices == ("provider anthropic: seed is left out, as it has no effect there",)


def test_a_provider_of_which_nothing_is_known_is_asked_all_of_it():
    asked = arguments({"messages": HI, "n": 2, "seed": 1}, Provider("new", None, passes_any_field=False))
    assert asked.values == {"messages": HI, "n": 2, "seed": 1}


@pytest.mark.parametrize("messages", [None, "hi", [], ["hi"], {}])
def test_messages_must_be_messages(messages):
    with pytest.raises(InvalidRequest) as raised:
        arguments({"messages": messages}, OTHER)
    assert raised.value.param == "messages"


def test_tools_that_would_connect_to_a_server_are_refused():
    with pytest.raises(InvalidRequest, match="mcp"):
        arguments({"messages": HI, "tools": [{"type": "mcp", "server_url": "http://127.0.0.1"}]}, OTHER)


NAMES = st.sampled_from([*DANGEROUS, "temperature", "top_k", "seed", "foo", "tools"]) | st.text(max_size=20)
VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just([]) | st.just({})


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=8), st.sampled_from([ALIKE, OTHER]))
def test_every_field_is_asked_for_or_spoken_of_or_says_nothing(fields, provider):
    try:
        asked = arguments({**fields, "messages": HI}, provider)
    except InvalidRequest:
        return  # of which the tests above say when it is right
    assert not set(DANGEROUS) & set(asked.values)
    told = " ".join(asked.notices)
    for name, value in fields.items():
        shown = name.isprintable() and len(name) <= 64
        if (
            value is None
            or name in ("messages", "model", "stream", "stream_options")
            or not shown
            or value in (1, [], {}, 0)
        ):
            continue
        assert name in asked.values or name in asked.values.get("extra_body", {}) or name in told
