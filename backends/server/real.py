"""The real engines, as instances that the server drives. Importing this loads torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from backends.config import EngineConfig
from backends.core.errors import RequestRefused
from backends.core.request import AnswerText
from backends.engines.base import Emit
from backends.engines.build import build_merged
from backends.engines.split.build import build_decode, build_prefill
from backends.protocol.messages import ChatPrompt, GrammarSpec, Prompt
from backends.server.devices import bind_computing_threads, device_notices, give_way, resolve_device
from backends.server.instances import DecodeInstance, Instance, MergedInstance, PrefillInstance
from backends.text.grammar import AnswerGrammar, Grammars
from backends.text.grammar_source import GrammarError
from backends.text.tokenizer import PromptError, TextCodec


@dataclass(frozen=True, slots=True)
class RefusingCodec:
    """A text codec whose complaints about a prompt or a grammar are refusals of the request."""

    codec: TextCodec
    grammars: Grammars

    @classmethod
    def of(cls, codec: TextCodec) -> RefusingCodec:
        return cls(codec, codec.grammars())

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.codec.eos_token_ids

    def min_tokens(self, prompt: Prompt) -> int:
        return self.codec.min_tokens(prompt)

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        try:
            return self.codec.encode_prompt(prompt)
        except PromptError as error:
            raise RequestRefused("invalid_request", str(error), error.param) from error

    def grammar(self, spec: GrammarSpec) -> AnswerGrammar:
        try:
            return self.grammars.start(spec)
        except GrammarError as error:
            raise RequestRefused("invalid_request", str(error), error.param) from error

    def echo(self, prompt: Prompt, token_ids: Sequence[int], *, with_offsets: bool) -> tuple[str, list[int]]:
        return self.codec.echo(prompt, token_ids, with_offsets=with_offsets)

    def answer_text(self, prompt: ChatPrompt, token_ids: Sequence[int]) -> AnswerText:
        return AnswerText(self.codec.opening(prompt, token_ids), self.codec.marks(with_tools=bool(prompt.tools)))


def build_real_instance(config: EngineConfig, *, emit: Emit, wake: Callable[[], None]) -> Instance:
    """Called in the engine thread: torch's number of threads holds for the thread that sets it."""
    notices = device_notices(config, torch.cuda.is_available)
    config = resolve_device(config, torch.cuda.is_available)
    bind_computing_threads(config)
    give_way(config)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    match config.role:
        case "merged":
            merged = build_merged(config, emit)
            return MergedInstance(merged.engine, RefusingCodec.of(merged.codec))
        case "decode":
            decode = build_decode(config, emit)
            return DecodeInstance(decode.engine, RefusingCodec.of(decode.codec), notices)
        case "prefill":
            return PrefillInstance(build_prefill(config, wake).engine)
