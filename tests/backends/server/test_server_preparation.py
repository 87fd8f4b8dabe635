"""What a Generate becomes before an engine sees it."""

from __future__ import annotations

import pytest

from backends.core.request import AnswerText
from backends.engines.base import RequestRefused
from backends.protocol.messages import (
    CacheParams,
    ChatPrompt,
    EngineInfo,
    Generate,
    GrammarSpec,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from backends.server.preparation import Preparer

NOW = 100.0


class CountingCodec:
    """One token a word; says at least one token for every 1000 characters without encoding."""

    eos_token_ids = frozenset({2})

    def __init__(self) -> None:
        self.num_encoded = 0

    def min_tokens(self, prompt: Prompt) -> int:
        return len(prompt.text) // 1000 if isinstance(prompt, TextPrompt) else 0

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        self.num_encoded += 1
        if isinstance(prompt, TokenPrompt):
            return prompt.token_ids
        assert isinstance(prompt, TextPrompt)
        return [7] * len(prompt.text.split())


def make_info(**changes: object) -> EngineInfo:
    values: dict[str, object] = {
        "role": "merged",
        "pid": 1,
        "served_name": "m",
        "model_path": "m",
        "model_fingerprint": "f",
        "max_model_len": 100,
        "vocab_size": 1000,
        "block_size": 16,
        "num_blocks": 64,
        "kv_cache_dtype": "fp32",
        "kv_bytes_per_token": 4,
        "weight_dtype": "fp32",
        "device": "cpu",
        "num_threads": 1,
    }
    return EngineInfo(**(values | changes))  # type: ignore[arg-type]


def make_generate(text: str = "a b c", **changes: object) -> Generate:
    return Generate(**({"request_id": "r", "prompt": TextPrompt(text=text)} | changes))  # type: ignore[arg-type]


def refusal(generate: Generate, info: EngineInfo | None = None) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        Preparer(CountingCodec(), info or make_info()).prepare(generate, NOW)
    return caught.value


def test_a_request_gets_its_tokens_its_deadline_and_the_end_tokens_of_the_model():
    generate = make_generate(deadline_seconds=5.0, sampling=SamplingParams(max_tokens=10, seed=3))
    request = Preparer(CountingCodec(), make_info()).prepare(generate, NOW)

    assert request.prompt_token_ids == [7, 7, 7]
    assert (request.max_tokens, request.seed, request.notices) == (10, 3, ())
    assert (request.arrived_at, request.deadline_at) == (NOW, NOW + 5.0)
    assert request.eos_token_ids == {2}


def test_max_tokens_beyond_the_context_is_clamped_and_said():
    request = Preparer(CountingCodec(), make_info()).prepare(
        make_generate(sampling=SamplingParams(max_tokens=32000)), NOW
    )

    assert request.max_tokens == 97
    assert request.notices == ("max_tokens 32000 exceeds the context; using 97",)


def test_no_max_tokens_means_up_to_the_contexts_end_without_a_notice():
    request = Preparer(CountingCodec(), make_info()).prepare(make_generate(), NOW)

    assert (request.max_tokens, request.notices) == (97, ())


def test_requests_without_a_seed_get_different_ones():
    preparer = Preparer(CountingCodec(), make_info())

    assert preparer.prepare(make_generate(), NOW).seed != preparer.prepare(make_generate(), NOW).seed


@pytest.mark.parametrize("num_tokens", [100, 101, 5000])
def test_a_prompt_as_long_as_the_context_is_refused_in_the_words_agents_look_for(num_tokens: int):
    error = refusal(make_generate("a " * num_tokens))

    assert error.code == "context_length_exceeded"
    assert str(error) == (
        f"This model's maximum context length is 100 tokens. However, your prompt has {num_tokens} tokens. "
        "Please reduce the length of the prompt."
    )


def test_the_longest_prompt_that_fits_has_room_for_one_token():
    assert Preparer(CountingCodec(), make_info()).prepare(make_generate("a " * 99), NOW).max_tokens == 1


def test_an_absurdly_long_text_is_refused_without_being_encoded():
    codec = CountingCodec()
    with pytest.raises(RequestRefused, match="at least 1000 tokens"):
        Preparer(codec, make_info()).prepare(make_generate("x" * 1_000_000), NOW)

    assert codec.num_encoded == 0


def test_where_the_pool_limits_the_context_the_refusal_says_the_pools_size():
    error = refusal(make_generate("a " * 80), make_info(max_model_len=64, num_blocks=4))

    assert error.code == "kv_pool_too_small"
    assert "4 blocks (64 tokens)" in str(error)
    assert "maximum context length is 64 tokens" in str(error)


def test_another_kv_dtype_than_the_engines_is_refused_by_name():
    error = refusal(make_generate(cache=CacheParams(kv_cache_dtype="fp16")))

    assert (error.code, error.param) == ("invalid_request", "kv_cache_dtype")
    assert "'fp16'" in str(error)
    assert "fp32" in str(error)


@pytest.mark.parametrize("dtype", ["auto", "fp32"])
def test_the_engines_own_kv_dtype_is_accepted(dtype: str):
    cache = CacheParams(kv_cache_dtype=dtype)
    assert Preparer(CountingCodec(), make_info()).prepare(make_generate(cache=cache), NOW).cache is cache


@pytest.mark.parametrize("token_ids", [[-1], [1, 1000], [1, 2**40]])
def test_token_ids_outside_the_vocabulary_are_refused(token_ids: list[int]):
    error = refusal(make_generate(prompt=TokenPrompt(token_ids=token_ids)))

    assert (error.code, error.param) == ("invalid_request", "prompt")
    assert "0 to 999" in str(error)


def test_an_empty_prompt_is_refused():
    assert refusal(make_generate("")).code == "invalid_request"


def test_sampling_out_of_range_is_refused_by_its_field():
    assert refusal(make_generate(sampling=SamplingParams(top_p=0.0))).param == "top_p"


class MarkedCodec(CountingCodec):
    def encode_prompt(self, prompt: Prompt) -> list[int]:
        return [7] if isinstance(prompt, ChatPrompt) else super().encode_prompt(prompt)

    def answer_text(self, prompt: ChatPrompt, token_ids: list[int]) -> AnswerText:
        assert token_ids == [7]
        return AnswerText("<think>\n", {5: "<tool_call>"} if prompt.tools else {})

    def grammar(self, spec: GrammarSpec) -> None:
        return None


def test_tc_07_a_chats_answer_begins_with_what_its_prompt_opened():
    def text_of(prompt: Prompt, sampling: SamplingParams | None = None) -> AnswerText:
        generate = make_generate(prompt=prompt, sampling=sampling or SamplingParams())
        return Preparer(MarkedCodec(), make_info()).prepare(generate, NOW).answer_text

    messages = [{"role": "user", "content": "hi"}]
    assert text_of(ChatPrompt(messages=messages)) == AnswerText("<think>\n", {})
    assert text_of(ChatPrompt(messages=messages, tools=[{}])) == AnswerText("<think>\n", {5: "<tool_call>"})
    assert text_of(TextPrompt(text="hi")) == AnswerText()
    held = SamplingParams(grammar=GrammarSpec(kind="json_object"))
    assert text_of(ChatPrompt(messages=messages), held) == AnswerText(), "a grammar knows no reasoning"


def test_a_count_may_exceed_the_context_but_takes_no_megabytes():
    codec = CountingCodec()
    preparer = Preparer(codec, make_info())
    assert preparer.count(TextPrompt(text="a " * 101)) == 101
    with pytest.raises(RequestRefused, match="at least 1000 tokens") as refused:
        preparer.count(TextPrompt(text="a" * 1_000_000))
    assert (refused.value.code, codec.num_encoded) == ("context_length_exceeded", 1)
