"""Several answers to one prompt: what the client hears, what is shared, what ends together."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest
import torch

from backends.core.errors import RequestRefused
from backends.core.request import Request
from backends.engines.choices import Choices, choice_seed
from backends.protocol.messages import (
    Accepted,
    CacheParams,
    Done,
    Failed,
    FromEngine,
    SamplingParams,
    Timings,
    TokenChunk,
    Usage,
)
from support.answering import MergedAnswers, SplitAnswers
from support.tiny_model import make_tiny_llama

torch.set_num_threads(1)

TEXT = "the cache holds keys and values of every token that a model has read so far in blocks of sixteen"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)


@pytest.fixture(params=[MergedAnswers, SplitAnswers])
def answers(request: pytest.FixtureRequest, folder: Path) -> MergedAnswers:
    return request.param(folder)


def test_choices_are_what_their_seeds_answer_alone(answers):
    together = answers.ask(TEXT, n=4, seed=7, temperature=1.0, ignore_eos=True)
    for index in range(4):
        alone = answers.ask(TEXT, seed=choice_seed(7, index), temperature=1.0, ignore_eos=True)
        assert together.tokens(index) == alone.tokens()
        assert together.text(index) == alone.text()
    assert len({tuple(together.tokens(index)) for index in range(4)}) > 1
    assert together.reasons() == dict.fromkeys(range(4), "length")


def test_the_prompt_is_counted_and_computed_once(answers):
    answer = answers.ask(TEXT, n=3, ignore_eos=True)
    prompt_tokens = answers.accepted("r1").prompt_tokens
    usage = answer.done.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (prompt_tokens, 36, 0)
    side = answers.prefill if isinstance(answers, SplitAnswers) else answers.engine
    full_blocks = (prompt_tokens - 1) // 4 * 4
    assert side.stats().prefix_hit_tokens == 2 * full_blocks
    assert [type(item).__name__ for item in answer.said].count("Accepted") == 1


def test_greedy_choices_are_equal_and_stop_on_their_own(answers):
    answer = answers.ask(TEXT, n=3, logprobs=1)
    assert answer.tokens(0) == answer.tokens(1) == answer.tokens(2)
    for index in (1, 2):
        pairs = zip(answer.logprobs(0), answer.logprobs(index), strict=True)
        for one, other in pairs:
            assert one.text == other.text
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_each_choice_echoes_the_prompt_which_is_scored_once(answers):
    answer = answers.ask(TEXT, n=2, echo=True, logprobs=1, prompt_logprobs=1, max_tokens=2, ignore_eos=True)
    prompt_tokens = answer.done.usage.prompt_tokens
    for index in range(2):
        assert answer.text(index).startswith(TEXT)
        assert len(answer.logprobs(index)) == prompt_tokens + 2
    assert answer.logprobs(0)[:prompt_tokens] == answer.logprobs(1)[:prompt_tokens]
    nothing = answers.ask(TEXT, n=2, echo=True, max_tokens=0)
    assert (nothing.text(0), nothing.text(1), nothing.done.usage.completion_tokens) == (TEXT, TEXT, 0)


def test_without_the_prefix_cache_choices_still_answer(answers):
    answer = answers.ask(TEXT, CacheParams(enable_prefix_cache=False), n=2, ignore_eos=True)
    assert answer.tokens(0) == answer.tokens(1)
    assert answers.engine.stats().num_blocks_in_use == 0


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_an_abort_ends_all_choices_in_any_state(folder, num_steps):
    answers = MergedAnswers(folder, prefill_chunk_tokens=16)
    name = answers.submit(TEXT, n=5, ignore_eos=True, max_tokens=100)
    for _ in range(num_steps):
        answers.step()
    answers.choices.abort(name)
    num_said = len(answers.said)
    answers.run()
    assert len(answers.said) == num_said
    assert answers.engine.num_unfinished() == answers.engine.stats().num_blocks_in_use == 0
    assert answers.ask(TEXT).done.usage.completion_tokens > 0


def test_choices_that_find_the_queue_full_come_when_there_is_room(folder):
    answers = MergedAnswers(folder, max_num_seqs=1, max_waiting=2)
    name = answers.submit(TEXT, n=6, ignore_eos=True)
    answers.run()
    assert answers.answered(name).reasons() == dict.fromkeys(range(6), "length")
    for _ in range(3):  # one takes the free seat, two wait
        answers.submit(TEXT, n=2)
    with pytest.raises(RequestRefused, match="waiting"):
        answers.submit(TEXT, n=2)
    answers.run()
    assert answers.engine.num_unfinished() == 0


class ScriptedTaker:
    """Takes requests, says nothing by itself."""

    def __init__(self) -> None:
        self.said: list[FromEngine] = []
        self.posted: deque = deque()
        self.choices = Choices(self.said.append, self.posted.append)
        self.choices.attach(self)
        self.submitted: list[Request] = []
        self.aborted: list[str] = []

    def submit(self, request: Request) -> None:
        self.submitted.append(request)
        self.choices.emit(Accepted(request_id=request.request_id, prompt_tokens=1, max_tokens=9))

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def begin(self, n: int) -> None:
        sampling = SamplingParams(n=n)
        self.choices.submit(Request("r", [1], 9, frozenset(), sampling, CacheParams(), 0, 0.0))
        self.choices.emit(TokenChunk(request_id="r:0", text="a", token_ids=[1]))
        while self.posted:
            self.posted.popleft()()


def done(request_id: str, tokens: int = 1) -> Done:
    usage = Usage(prompt_tokens=1, completion_tokens=tokens)
    return Done(request_id=request_id, finish_reason="stop", usage=usage, timings=Timings())


def test_one_choice_that_fails_ends_all_and_is_told_once():
    taker = ScriptedTaker()
    taker.begin(3)
    taker.choices.emit(done("r:1"))
    taker.choices.emit(Failed(request_id="r:2", code="internal", message="broke"))
    while taker.posted:
        taker.posted.popleft()()
    assert taker.said[-1] == Failed(request_id="r", code="internal", message="broke")
    assert taker.aborted == ["r:0"]
    num_said = len([item for item in taker.said if getattr(item, "request_id", None) == "r"])
    taker.choices.emit(done("r:0"))
    assert len([item for item in taker.said if getattr(item, "request_id", None) == "r"]) == num_said


def test_the_last_choice_to_end_brings_the_usage_of_all():
    taker = ScriptedTaker()
    taker.begin(3)
    assert [request.request_id for request in taker.submitted] == ["r:0", "r:1", "r:2"]
    assert len({request.seed for request in taker.submitted}) == 3
    for index, tokens in ((2, 5), (0, 7), (1, 9)):
        taker.choices.emit(done(f"r:{index}", tokens))
    *_, second, first, last = taker.said
    assert (second.index, second.finish_reason, first.index, first.finish_reason) == (2, "stop", 0, "stop")
    assert (last.index, last.usage.completion_tokens, last.usage.prompt_tokens) == (1, 21, 1)
