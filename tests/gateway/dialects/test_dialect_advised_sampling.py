"""A request that says nothing is sampled as the settings say, else as the model's authors advise."""

from __future__ import annotations

from gateway.dialects import openai_chat
from gateway.dialects.sampling import Defaults

ADVISED = {"temperature": 0.2, "top_p": 0.9, "top_k": 40.0, "min_p": 0.1, "repetition_penalty": 1.1}
BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def test_what_is_left_out_is_as_advised():
    sampling = openai_chat.DIALECT.parse(BODY, Defaults(model_sampling=ADVISED)).sampling

    assert (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty) == (0.2, 0.9, 0.1, 1.1)
    assert sampling.top_k == 40
    assert isinstance(sampling.top_k, int)


def test_settings_win_over_advice_and_the_request_over_both():
    defaults = Defaults(temperature=0.7, model_sampling=ADVISED)

    assert openai_chat.DIALECT.parse(BODY, defaults).sampling.temperature == 0.7
    own = openai_chat.DIALECT.parse({**BODY, "top_p": 0.5, "top_k": 0}, Defaults(model_sampling=ADVISED)).sampling
    assert (own.temperature, own.top_p, own.top_k, own.min_p) == (0.2, 0.5, 0, 0.1)


def test_whoever_chooses_a_temperature_chooses_the_rest_too():
    for greedy in (
        openai_chat.DIALECT.parse({**BODY, "temperature": 0}, Defaults(model_sampling=ADVISED)).sampling,
        openai_chat.DIALECT.parse(BODY, Defaults(temperature=0, model_sampling=ADVISED)).sampling,
    ):
        assert (greedy.top_p, greedy.top_k, greedy.min_p, greedy.repetition_penalty) == (1.0, 0, 0.0, 1.0)


def test_without_advice_the_api_s_own_defaults_hold():
    sampling = openai_chat.DIALECT.parse(BODY, Defaults()).sampling

    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
