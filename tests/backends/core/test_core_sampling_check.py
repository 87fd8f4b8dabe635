from __future__ import annotations

import math

import pytest

from backends.core.errors import RequestRefused
from backends.core.sampling_check import check_sampling
from backends.protocol.messages import SamplingParams


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=0),
        SamplingParams(temperature=2, top_p=0.01, top_k=1, min_p=1, presence_penalty=-2, frequency_penalty=2),
        SamplingParams(max_tokens=1, min_tokens=1, repetition_penalty=0.1),
        SamplingParams(min_tokens=5),
        SamplingParams(stop=("a",) * 16, logit_bias={0: -100, 9: 100}, stop_token_ids=(0, 9)),
    ],
)
def test_values_at_the_edges_of_their_ranges_pass(params):
    check_sampling(params, vocab_size=10)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "from 0 to 2"),
        ("temperature", 2.1, "from 0 to 2"),
        ("temperature", math.nan, "from 0 to 2"),
        ("top_p", 0, "greater than 0 and at most 1"),
        ("top_p", 1.1, "greater than 0 and at most 1"),
        ("top_k", -2, "off"),
        ("min_p", -0.1, "from 0 to 1"),
        ("min_p", 1.1, "from 0 to 1"),
        ("presence_penalty", 2.1, "from -2 to 2"),
        ("frequency_penalty", -2.1, "from -2 to 2"),
        ("repetition_penalty", 0, "greater than 0"),
        ("repetition_penalty", math.inf, "greater than 0"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", -1, "at least 1"),
        ("min_tokens", -1, "at least 0"),
        ("n", 0, "from 1 to 8"),
        ("n", 9, "from 1 to 8"),
        ("logprobs", -1, "from 0 to 20"),
        ("logprobs", 21, "from 0 to 20"),
        ("prompt_logprobs", 21, "from 0 to 20"),
        ("stop", ("a",) * 17, "at most 16"),
        ("stop", ("a", ""), "at least one character"),
        ("stop_token_ids", (10,), "from 0 to 9"),
        ("logit_bias", {10: 1.0}, "from 0 to 9"),
        ("logit_bias", {-1: 1.0}, "from 0 to 9"),
        ("logit_bias", {1: 100.5}, "from -100 to 100"),
        ("logit_bias", {1: math.nan}, "from -100 to 100"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name_with_what_is_allowed(field, value, allowed):
    with pytest.raises(RequestRefused, match=field) as refusal:
        check_sampling(SamplingParams(**{field: value}), vocab_size=10)
    assert refusal.value.code == "invalid_request"
    assert refusal.value.param == field
    assert allowed in str(refusal.value)


def test_more_tokens_at_least_than_at_most_are_refused():
    with pytest.raises(RequestRefused, match="at most max_tokens, 3") as refusal:
        check_sampling(SamplingParams(min_tokens=4, max_tokens=3), vocab_size=10)
    assert refusal.value.param == "min_tokens"


def test_an_answer_of_no_tokens_is_allowed_to_an_echo_alone():
    check_sampling(SamplingParams(max_tokens=0, echo=True), vocab_size=10)
    with pytest.raises(RequestRefused, match="0 with echo"):
        check_sampling(SamplingParams(max_tokens=0), vocab_size=10)
