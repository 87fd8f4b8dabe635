from __future__ import annotations

import pytest
from core_helpers import make_request

from backends.core.outputs import Ending, ending_by_length, ending_by_stop_token
from backends.protocol.messages import SamplingParams

EOS = 2


@pytest.mark.parametrize(
    ("sampling", "tokens", "ending"),
    [
        (SamplingParams(), [5, EOS], Ending("stop", hides_token=True)),
        (SamplingParams(), [EOS, 5], None),
        (SamplingParams(ignore_eos=True), [EOS], None),
        (SamplingParams(min_tokens=2), [EOS], None),
        (SamplingParams(min_tokens=2), [5, EOS], Ending("stop", hides_token=True)),
        (SamplingParams(stop_token_ids=(7,)), [7], Ending("stop", 7, hides_token=True)),
        (SamplingParams(stop_token_ids=(7,), min_tokens=2), [7], None),
        (SamplingParams(stop_token_ids=(EOS,), ignore_eos=True), [EOS], Ending("stop", EOS, hides_token=True)),
    ],
)
def test_an_answer_ends_at_a_stop_token(sampling, tokens, ending):
    request = make_request(sampling=sampling, eos_token_ids=frozenset({EOS}))
    request.output_token_ids = tokens
    assert ending_by_stop_token(request) == ending


def test_an_answer_ends_at_max_tokens_or_when_the_pool_cannot_hold_one_more():
    request = make_request(num_tokens=4, max_tokens=3)
    request.output_token_ids = [1, 1]
    assert ending_by_length(request, 6) is None
    assert ending_by_length(request, 5) == Ending("length")
    request.output_token_ids = [1, 1, 1]
    assert ending_by_length(request, 100) == Ending("length")
