"""From a `Generate` to an admissible `Request`: encode, check, clamp. Knows no engine and no socket."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from backends.core.request import AnswerText, Echo, Request, TokenGrammar
from backends.core.sampling_check import check_sampling, scoring_chunk
from backends.engines.base import RequestRefused
from backends.protocol.messages import ChatPrompt, EngineInfo, Generate, GrammarSpec, Prompt, SamplingParams


class PromptCodec(Protocol):
    """The part of a text codec that requests need. Called from several threads."""

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def encode_prompt(self, prompt: Prompt) -> list[int]: ...

    def min_tokens(self, prompt: Prompt) -> int:
        """A lower bound of the number of tokens, found without encoding."""

    def grammar(self, spec: GrammarSpec) -> TokenGrammar:
        """Raises `RequestRefused`."""

    def echo(self, prompt: Prompt, token_ids: Sequence[int], *, with_offsets: bool) -> tuple[str, list[int]]:
        """The prompt as text, and where its tokens begin in it."""

    def answer_text(self, prompt: ChatPrompt, token_ids: Sequence[int]) -> AnswerText:
        """What the text of an answer to this prompt has beside its tokens' own."""


@dataclass(frozen=True, slots=True)
class Preparer:
    """Checks what needs no engine state, so that many requests can be prepared while a step computes."""

    codec: PromptCodec
    info: EngineInfo

    def prepare(self, generate: Generate, arrived_at: float) -> Request:
        """Raises `RequestRefused` for whatever the client should hear of."""
        self._check_kv_dtype(generate.cache.kv_cache_dtype)
        check_sampling(generate.sampling, vocab_size=self.info.vocab_size)
        self._check_length(self.codec.min_tokens(generate.prompt), at_least=True)
        token_ids = self.codec.encode_prompt(generate.prompt)
        self._check_length(len(token_ids))
        self._check_vocabulary(token_ids)
        max_tokens, notices = self._clamp_max_tokens(generate.sampling.max_tokens, len(token_ids))
        sampling = generate.sampling
        cache = generate.cache
        if sampling.prompt_logprobs is not None:
            cache = msgspec.structs.replace(cache, chunk_size=scoring_chunk(cache.chunk_size))
        seed = sampling.seed
        deadline = generate.deadline_seconds
        return Request(
            request_id=generate.request_id,
            prompt_token_ids=token_ids,
            max_tokens=max_tokens,
            eos_token_ids=self.codec.eos_token_ids,
            sampling=sampling,
            cache=cache,
            seed=secrets.randbits(63) if seed is None else seed,
            arrived_at=arrived_at,
            deadline_at=None if deadline is None else arrived_at + deadline,
            notices=notices,
            grammar=None if sampling.grammar is None else self.codec.grammar(sampling.grammar),
            echo=self._echo(generate.prompt, token_ids, sampling),
            answer_text=self._answer_text(generate.prompt, token_ids, sampling),
        )

    def count(self, prompt: Prompt) -> int:
        """Tokens of a prompt, also of one too long to be served, unless that shows without encoding it: megabytes
        would keep an encoder for minutes. Raises `RequestRefused`, also for one that can't be encoded."""
        self._check_length(self.codec.min_tokens(prompt), at_least=True)
        return len(self.codec.encode_prompt(prompt))

    def _answer_text(self, prompt: Prompt, token_ids: list[int], sampling: SamplingParams) -> AnswerText:
        """A grammar says what an answer is from its first character on."""
        if sampling.grammar is not None or not isinstance(prompt, ChatPrompt):
            return AnswerText()
        return self.codec.answer_text(prompt, token_ids)

    def _echo(self, prompt: Prompt, token_ids: list[int], sampling: SamplingParams) -> Echo | None:
        if not sampling.echo:
            return None
        return Echo(*self.codec.echo(prompt, token_ids, with_offsets=sampling.prompt_logprobs is not None))

    def _check_kv_dtype(self, asked: str) -> None:
        own = self.info.kv_cache_dtype
        if asked not in ("auto", own):
            raise RequestRefused(
                "invalid_request",
                f"kv_cache_dtype {asked!r} is not available: the KV cache of this engine is {own}. "
                f"Use 'auto' or {own!r}, or set kv_cache_dtype in the engine's settings and restart it.",
                "kv_cache_dtype",
            )

    def _check_length(self, num_tokens: int, *, at_least: bool = False) -> None:
        if num_tokens == 0 and not at_least:
            raise RequestRefused("invalid_request", "The prompt is empty: it must have at least one token.", "prompt")
        if num_tokens < self.info.max_model_len:
            return
        limit = f"This model's maximum context length is {self.info.max_model_len} tokens"
        prompt = f"your prompt has {'at least ' if at_least else ''}{num_tokens} tokens"
        advice = "Please reduce the length of the prompt."
        pool_tokens = self.info.num_blocks * self.info.block_size
        if pool_tokens <= self.info.max_model_len:
            pool = f", all that its KV pool of {self.info.num_blocks} blocks ({pool_tokens} tokens) can hold"
            raise RequestRefused("kv_pool_too_small", f"{limit}{pool}. However, {prompt}. {advice}")
        raise RequestRefused("context_length_exceeded", f"{limit}. However, {prompt}. {advice}")

    def _check_vocabulary(self, token_ids: list[int]) -> None:
        """A text can't fail this; ids that a client sends can."""
        if min(token_ids) < 0 or max(token_ids) >= self.info.vocab_size:
            allowed = f"token ids from 0 to {self.info.vocab_size - 1}"
            message = f"The prompt has a token id out of range; allowed: {allowed}."
            raise RequestRefused("invalid_request", message, "prompt")

    def _clamp_max_tokens(self, asked: int | None, num_prompt_tokens: int) -> tuple[int, tuple[str, ...]]:
        room = self.info.max_model_len - num_prompt_tokens
        if asked is None:
            return room, ()
        if asked <= room:
            return asked, ()
        return room, (f"max_tokens {asked} exceeds the context; using {room}",)
