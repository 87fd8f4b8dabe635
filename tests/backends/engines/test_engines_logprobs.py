"""Logprobs of answers and prompts, in both layouts: what the model's own logits say, whatever else happens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from backends.protocol.messages import CacheParams, TokenLogprob
from support.answering import MergedAnswers, SplitAnswers
from support.tiny_model import make_tiny_llama

torch.set_num_threads(1)

TEXT = "the cache holds keys and values of every token that a model has read so far é漢字 in blocks of sixteen"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def logits_of(folder: Path):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logprobs(tokens: list[int]) -> torch.Tensor:
        """Row i: of the token behind token i."""
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([tokens])).logits[0], dim=-1)

    return logprobs


@pytest.fixture(scope="module", params=[MergedAnswers, SplitAnswers])
def answers(request: pytest.FixtureRequest, folder: Path) -> MergedAnswers:
    return request.param(folder)


def check(found: list[TokenLogprob], tokens: list[int], rows: torch.Tensor, codec, num_top: int) -> None:
    assert len(found) == len(tokens) == len(rows)
    for item, token_id, row in zip(found, tokens, rows, strict=True):
        assert item.logprob == pytest.approx(row[token_id].item(), abs=1e-3)
        assert (item.text, item.bytes) == codec.spelling(token_id)
        assert [other.logprob for other in item.top] == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-3)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5, "top_k": 3, "presence_penalty": 2.0, "seed": 4}])
def test_logprobs_are_of_the_raw_logits_whatever_chooses_the_token(answers, logits_of, sampling):
    answer = answers.ask(TEXT, logprobs=3, ignore_eos=True, **sampling)
    prompt = answers.codec._encode(TEXT, "prompt", add_special_tokens=True)
    tokens = answer.tokens()
    rows = logits_of(prompt + tokens)[len(prompt) - 1 : -1]
    check(answer.logprobs(), tokens, rows, answers.codec, 3)
    offsets = [item.offset for item in answer.logprobs()]
    text = answer.text()
    for item, offset in zip(answer.logprobs(), offsets, strict=True):
        rest = text[offset:].lstrip("\ufffd")  # of a character that this token broke off
        assert "\ufffd" in item.text or item.bytes is None or rest.startswith(item.text)


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 64])
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_a_prompt_is_scored_whole_for_any_chunk_size(answers, logits_of, chunk, max_tokens):
    cache = CacheParams(chunk_size=chunk)
    warm = answers.ask(TEXT)
    answer = answers.ask(TEXT, cache, echo=True, logprobs=2, prompt_logprobs=2, max_tokens=max_tokens, ignore_eos=True)
    prompt = answers.codec._encode(TEXT, "prompt", add_special_tokens=True)
    first, *rest = answer.logprobs()[: len(prompt)]

    assert answer.text().startswith(TEXT)
    assert (first.text, first.logprob, first.offset, first.top) == (answers.codec.spelling(prompt[0])[0], None, 0, [])
    check(rest, prompt[1:], logits_of(prompt)[:-1], answers.codec, 2)
    assert "".join(item.bytes.decode("latin-1") for item in (first, *rest)) == TEXT.encode().decode("latin-1")
    assert answer.done.usage.cached_tokens == 0, "what is found computed has no logits"
    assert answer.done.usage.completion_tokens == max_tokens == len(answer.tokens())
    assert answer.done.finish_reason == "length"
    if max_tokens:
        assert answer.tokens() == warm.tokens()[:max_tokens]
        assert answer.logprobs()[len(prompt)].offset == len(TEXT)


def test_scoring_in_many_preempted_requests_is_scoring_alone(folder):
    alone = MergedAnswers(folder)
    prompts = [TEXT[start : start + 40] for start in range(0, 60, 12)]
    wanted = {"echo": True, "logprobs": 1, "prompt_logprobs": 1, "max_tokens": 30, "ignore_eos": True}
    expected = [alone.ask(prompt, **wanted) for prompt in prompts]

    crowded = MergedAnswers(folder, num_kv_blocks=30, prefill_chunk_tokens=7)
    names = [crowded.submit(prompt, **wanted) for prompt in prompts]
    crowded.run()
    assert crowded.engine.stats().num_preemptions > 0
    for name, other in zip(names, expected, strict=True):
        answer = crowded.answered(name)
        assert answer.text() == other.text()
        assert len(answer.logprobs()) == len(other.logprobs())
        for item, same in zip(answer.logprobs(), other.logprobs(), strict=True):
            assert item.text == same.text
            assert item.logprob == pytest.approx(same.logprob, abs=1e-4)


def test_a_scoring_request_leaves_its_prompt_to_others_and_counts_no_query(folder):
    answers = MergedAnswers(folder)
    answers.ask(TEXT, echo=True, logprobs=0, prompt_logprobs=0)
    assert answers.engine.stats().prefix_query_tokens == 0
    assert answers.ask(TEXT).done.usage.cached_tokens > 0


def test_an_echo_alone_needs_no_scores(answers):
    answer = answers.ask(TEXT, echo=True, max_tokens=0)
    assert (answer.text(), answer.logprobs(), answer.done.usage.completion_tokens) == (TEXT, [], 0)
    tokens = answers.codec._encode(TEXT, "prompt", add_special_tokens=True)
    assert answers.ask(tokens, echo=True, max_tokens=3).text().startswith(TEXT)


def test_logprobs_come_with_their_token_while_its_text_is_held_back(answers):
    plain = answers.ask(TEXT, ignore_eos=True)
    stop = plain.text()[3:5] + "\x00never"  # what begins it is held back
    held = answers.ask(TEXT, ignore_eos=True, stop=(stop,), logprobs=1)
    assert held.text() == plain.text()
    assert held.tokens() == plain.tokens()
    assert all(len(chunk.logprobs) == len(chunk.token_ids) == 1 for chunk in held.chunks)


def test_an_end_mark_is_no_content_and_has_no_logprob(answers):
    answer = answers.ask(TEXT, logprobs=0, logit_bias={2: 100.0})
    assert answer.tokens() == [2]
    assert answer.logprobs() == []
    assert answer.done.finish_reason == "stop"
