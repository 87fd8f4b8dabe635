"""What the sampler may pick, how often, and that nothing else in the batch matters."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.core.request import Request, TokenGrammar
from backends.protocol.messages import CacheParams, SamplingParams
from backends.worker.sampler import Candidates, adjusted_logits, candidates, pick, sample, uniform

torch.set_num_threads(1)
FIXED = settings(max_examples=60, derandomize=True, deadline=None)
VOCAB = 32


def make_request(
    *,
    prompt: tuple[int, ...] = (1, 2, 3),
    output: tuple[int, ...] = (),
    seed: int = 0,
    grammar: TokenGrammar | None = None,
    params: SamplingParams | None = None,
    **sampling: Any,
) -> Request:
    request = Request(
        request_id="r",
        prompt_token_ids=list(prompt),
        max_tokens=100,
        eos_token_ids=frozenset({0}),
        sampling=params or SamplingParams(**sampling),
        cache=CacheParams(),
        seed=seed,
        arrived_at=0.0,
        grammar=grammar,
    )
    request.output_token_ids += output
    return request


def dense(tokens: Candidates, vocab_size: int) -> torch.Tensor:
    """The weight of every token of the vocabulary."""
    if tokens.token_ids is None:
        return tokens.weights
    return torch.zeros(vocab_size, dtype=torch.float64).scatter_(0, tokens.token_ids, tokens.weights)


def make_logits(seed: int, num_rows: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 31, 32, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    min_tokens=st.sampled_from([0, 4]),
)


@given(st.lists(params_strategy, min_size=1, max_size=6), st.integers(0, 10_000))
@FIXED
def test_a_request_gets_the_same_token_in_any_batch(params: list[SamplingParams], seed: int) -> None:
    logits = make_logits(seed, len(params))
    requests = [make_request(output=(5, 5, 7), seed=seed + i, params=own) for i, own in enumerate(params)]
    together = sample(logits, requests)
    assert together == [sample(row[None], [request])[0] for row, request in zip(logits, requests, strict=True)]
    order = random.Random(seed).sample(range(len(params)), len(params))
    assert sample(logits[order], [requests[i] for i in order]) == [together[i] for i in order]


@given(params_strategy.filter(lambda params: params.temperature > 0), st.integers(0, 10_000))
@FIXED
def test_only_tokens_that_every_filter_keeps_are_picked(params: SamplingParams, seed: int) -> None:
    logits = make_logits(seed)[0]
    plain = torch.softmax(logits.double() / params.temperature, -1)
    kept = dense(candidates(logits, params), VOCAB)
    assert (kept > 0).any()
    assert ((kept == 0) | (kept == plain)).all()
    if params.top_k:
        assert (kept > 0).sum() <= params.top_k
    assert plain[kept > 0].min() >= params.min_p * plain.max()
    token_id = pick(candidates(logits, params), uniform(seed, 4))
    assert kept[token_id] > 0
    if params.top_k == 1 or params.min_p == 1.0:
        assert token_id == logits.argmax()


@pytest.mark.parametrize(
    ("top_p", "expected"), [(0.5, {0}), (0.51, {0, 1}), (0.8, {0, 1}), (0.81, {0, 1, 2}), (1, {0, 1, 2})]
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, expected: set[int]) -> None:
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    # just inside each limit, as log and softmax round
    kept = candidates(logits, SamplingParams(top_p=top_p if top_p == 1 else top_p - 1e-9))
    assert set(dense(kept, 3).nonzero().flatten().tolist()) == expected


def sorted_wholly(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The filters by their definition, over all of the vocabulary: slow, and obviously right."""
    weights = torch.softmax(logits.double() / params.temperature, -1)
    weights[weights < params.min_p * weights.max()] = 0
    for limit in ("top_k", "top_p"):
        ordered, token_ids = weights.sort(descending=True, stable=True)
        if limit == "top_k" and 0 < params.top_k < len(weights):
            ordered[params.top_k :] = 0
        if limit == "top_p" and params.top_p < 1:
            ordered[1:][ordered.cumsum(0)[:-1] >= params.top_p * weights.sum()] = 0
        weights = torch.zeros_like(weights).scatter_(0, token_ids, ordered)
    return weights


@given(
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.5, 1.0, 2.0]),
        top_k=st.sampled_from([0, 1, 7, 64, 65, 300, 5000]),
        top_p=st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]),
        min_p=st.sampled_from([0.0, 0.01]),
    ),
    st.integers(0, 1000),
    st.sampled_from([0.1, 1.0, 4.0]),
    st.booleans(),
)
@FIXED
def test_no_token_is_lost_or_won_by_not_sorting(
    params: SamplingParams, seed: int, spread: float, with_ties: bool
) -> None:
    logits = torch.randn(2000, generator=torch.Generator().manual_seed(seed)) * spread
    logits = (logits * 4).round() / 4 if with_ties else logits
    assert torch.equal(dense(candidates(logits, params), 2000), sorted_wholly(logits, params))


@given(st.integers(0, 2**63), st.integers(0, 10**6))
@FIXED
def test_random_numbers_belong_to_seed_and_position(seed: int, position: int) -> None:
    number = uniform(seed, position)
    assert 0 <= number < 1
    assert number == uniform(seed, position)
    assert number != uniform(seed, position + 1)
    assert number != uniform(seed + 1, position)


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    probabilities = torch.tensor([0.0, 0.1, 0.0, 0.6, 0.3, 0.0], dtype=torch.float64)
    num_draws = 4000
    counts = [0] * len(probabilities)
    for position in range(num_draws):
        counts[pick(Candidates(probabilities), uniform(11, position))] += 1
    assert counts[0] == counts[2] == counts[5] == 0
    for count, share in zip(counts, probabilities.tolist(), strict=True):
        assert abs(count / num_draws - share) < 0.03


@pytest.mark.parametrize(("number", "token_id"), [(0.0, 1), (0.24, 1), (0.26, 3), (1 - 2**-53, 3)])
def test_the_ends_of_the_unit_interval_fall_on_possible_tokens(number: float, token_id: int) -> None:
    assert pick(Candidates(torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0], dtype=torch.float64)), number) == token_id


def test_a_longer_answer_and_another_seed_draw_anew() -> None:
    logits = torch.zeros(1, VOCAB)
    by_length = {sample(logits, [make_request(output=(4,) * n)])[0] for n in range(20)}
    by_seed = {sample(logits, [make_request(seed=seed)])[0] for seed in range(20)}
    assert len(by_length) > 5
    assert len(by_seed) > 5


def test_temperature_zero_is_the_greatest_logit_whatever_the_filters() -> None:
    logits = make_logits(3)
    expected = int(logits.argmax())
    assert sample(logits, [make_request(temperature=0)]) == [expected]
    assert sample(logits, [make_request(temperature=0, top_p=0.1, top_k=2, min_p=0.5)]) == [expected]


def test_ending_tokens_wait_for_the_minimum_length() -> None:
    logits = torch.zeros(VOCAB)
    early = adjusted_logits(logits, make_request(min_tokens=2, output=(5,), stop_token_ids=(7, VOCAB + 5)))
    assert early.isinf().nonzero().flatten().tolist() == [0, 7]
    late = adjusted_logits(logits, make_request(min_tokens=2, output=(5, 5), stop_token_ids=(7,)))
    assert not late.isinf().any()
    ignoring = adjusted_logits(logits, make_request(min_tokens=2, ignore_eos=True, stop_token_ids=(7,)))
    assert ignoring.isinf().nonzero().flatten().tolist() == [7]


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.zeros(VOCAB)
    request = make_request(prompt=(9, 9), output=(5, 5, 6), presence_penalty=1.0, frequency_penalty=0.5)
    changed = adjusted_logits(logits, request)
    assert changed[[5, 6, 9]].tolist() == [-2.0, -1.5, 0.0]
    assert changed.count_nonzero() == 2


def test_repetition_counts_the_prompt_too_and_always_disfavours() -> None:
    logits = torch.full((VOCAB,), 2.0)
    logits[5] = -2.0
    changed = adjusted_logits(logits, make_request(prompt=(9, 9), output=(5,), repetition_penalty=2.0))
    assert changed[[5, 9, 10]].tolist() == [-4.0, 1.0, 2.0]


def test_a_bias_is_added_once_and_leaves_the_models_logits_alone() -> None:
    logits = torch.zeros(1, VOCAB)
    assert sample(logits, [make_request(temperature=0, logit_bias={8: 3.0})]) == [8]
    assert not logits.any()


class Mask:
    """A grammar that allows the same tokens everywhere."""

    def __init__(self, *token_ids: int) -> None:
        bits = sum(1 << token_id for token_id in token_ids)
        self._mask = bits.to_bytes(VOCAB // 8, "little")

    def allowed(self, output_token_ids: Sequence[int]) -> bytes:
        return self._mask

    def is_complete(self, output_token_ids: Sequence[int]) -> bool:
        return False

    def fresh(self) -> Mask:
        return self


@given(params_strategy, st.sets(st.integers(1, VOCAB - 1), min_size=1), st.integers(0, 1000))
@FIXED
def test_a_grammar_comes_before_everything_else(params: SamplingParams, allowed: set[int], seed: int) -> None:
    likeliest_is_forbidden = make_logits(seed)
    request = make_request(seed=seed, grammar=Mask(*allowed), params=params)
    assert sample(likeliest_is_forbidden, [request])[0] in allowed


def test_a_grammar_that_only_ends_is_stronger_than_the_minimum_length() -> None:
    logits = make_logits(1)
    request = make_request(min_tokens=9, temperature=0, grammar=Mask(0))
    assert sample(logits, [request]) == [0]
    assert sample(logits, [make_request(min_tokens=9, temperature=0, grammar=Mask(0, 5))]) == [5]


def test_plain_greedy_requests_are_known_when_they_are_made() -> None:
    assert make_request(temperature=0, top_p=0.5).takes_likeliest
    for sampling in ({}, {"min_tokens": 1}, {"logprobs": 0}, {"logit_bias": {1: 1.0}}, {"repetition_penalty": 1.1}):
        assert not make_request(**({"temperature": 0} | sampling if sampling else {})).takes_likeliest
    assert not make_request(temperature=0, grammar=Mask(1)).takes_likeliest
