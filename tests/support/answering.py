"""Real engines of a model's folder, from `Generate` to what the gateway hears, without processes or sockets."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typing_extensions import override

from backends.config import EngineConfig
from backends.engines.base import Engine, PeerId
from backends.engines.build import build_merged
from backends.engines.choices import Choices
from backends.engines.split.build import build_decode, build_prefill
from backends.protocol.messages import (
    Accepted,
    CacheParams,
    ChatPrompt,
    Done,
    Failed,
    FromEngine,
    FromPrefill,
    Generate,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokenChunk,
    TokenLogprob,
    TokenPrompt,
    ToPrefill,
)
from backends.server.preparation import Preparer
from backends.server.real import RefusingCodec
from backends.text.tokenizer import TextCodec

PEER = PeerId("the-other-side", 1)


class Answered:
    """What was said of one request."""

    def __init__(self, said: list[FromEngine]) -> None:
        self.said = said
        self.chunks = [item for item in said if isinstance(item, TokenChunk)]

    @property
    def done(self) -> Done:
        last = self.said[-1]
        assert isinstance(last, Done), last
        return last

    @property
    def failed(self) -> Failed:
        last = self.said[-1]
        assert isinstance(last, Failed), last
        return last

    def text(self, index: int = 0) -> str:
        own = "".join(chunk.text for chunk in self.chunks if chunk.index == index)
        return own + (self.done.text if self.done.index == index else "")

    def tokens(self, index: int = 0) -> list[int]:
        return [token_id for chunk in self.chunks if chunk.index == index for token_id in chunk.token_ids]

    def logprobs(self, index: int = 0) -> list[TokenLogprob]:
        return [item for chunk in self.chunks if chunk.index == index for item in chunk.logprobs or ()]

    def reasons(self) -> dict[int, str]:
        ended = [(chunk.index, chunk.finish_reason) for chunk in self.chunks if chunk.finish_reason]
        ended.append((self.done.index, self.done.finish_reason))
        assert len(ended) == len(dict(ended)), "a choice ended twice"
        return dict(ended)


class MergedAnswers:
    """One engine. `ask` answers one request, `submit` and `run` several."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.said: list[FromEngine] = []
        self._posted: deque[Callable[[], None]] = deque()
        self.choices = Choices(self.said.append, self._posted.append)
        self._count = 0
        self.engine, codec = self._build(folder, config)
        self.choices.attach(self.engine)
        self.codec = codec
        self.preparer = Preparer(RefusingCodec.of(codec), self.engine.info)

    def _build(self, folder: Path, config: dict[str, Any]) -> tuple[Engine, TextCodec]:
        built = build_merged(make_config(folder, "merged", config), self.choices.emit)
        return built.engine, built.codec

    def ask(self, prompt: str | list[int] | Prompt, cache: CacheParams | None = None, **sampling: Any) -> Answered:
        name = self.submit(prompt, cache, **sampling)
        self.run()
        return self.answered(name)

    def submit(self, prompt: str | list[int] | Prompt, cache: CacheParams | None = None, **sampling: Any) -> str:
        self._count += 1
        name = f"r{self._count}"
        params = SamplingParams(**({"temperature": 0, "max_tokens": 12} | sampling))
        generate = Generate(request_id=name, prompt=as_prompt(prompt), sampling=params, cache=cache or CacheParams())
        self.choices.submit(self.preparer.prepare(generate, time.monotonic()))
        return name

    def step(self) -> bool:
        while self._posted:
            self._posted.popleft()()
        return self.engine.step()

    def run(self) -> None:
        while self._posted or self.engine.num_unfinished():
            assert self.step() or self._posted or not self.engine.num_unfinished()

    def answered(self, name: str) -> Answered:
        return Answered([item for item in self.said if getattr(item, "request_id", None) == name])

    def accepted(self, name: str) -> Accepted:
        (accepted,) = [item for item in self.answered(name).said if isinstance(item, Accepted)]
        return accepted


class SplitAnswers(MergedAnswers):
    """Both sides in this thread; copies run in their pool."""

    @override
    def _build(self, folder: Path, config: dict[str, Any]) -> tuple[Engine, TextCodec]:
        self._woken = threading.Event()
        self._to_prefill: deque[ToPrefill] = deque()
        self._from_prefill: deque[FromPrefill] = deque()
        built = build_decode(make_config(folder, "decode", config), self.choices.emit)
        self.decode = built.engine
        self.prefill = build_prefill(make_config(folder, "prefill", config), self._woken.set).engine
        fd = self.decode.kv_memory_fd
        assert self.prefill.pair(PEER, self.decode.pair_message(), fd, self._from_prefill.append) is None
        self.decode.peer_connected(PEER, self, self.prefill.info)
        return self.decode, built.codec

    def send(self, message: ToPrefill) -> None:
        self._to_prefill.append(message)

    @override
    def step(self) -> bool:
        self._woken.clear()
        progressed = bool(self._to_prefill)
        while self._to_prefill:
            self.prefill.peer_message(PEER, self._to_prefill.popleft())
        progressed |= self.prefill.step()
        progressed |= bool(self._from_prefill)
        while self._from_prefill:
            self.decode.peer_message(PEER, self._from_prefill.popleft())
        progressed |= super().step()
        return progressed or bool(self._to_prefill) or self._woken.wait(20)


def as_prompt(prompt: str | list[int] | Prompt) -> Prompt:
    if isinstance(prompt, str):
        return TextPrompt(text=prompt)
    return TokenPrompt(token_ids=prompt) if isinstance(prompt, list) else prompt


def chat(text: str, **fields: Any) -> ChatPrompt:
    return ChatPrompt(messages=[{"role": "user", "content": text}], **fields)


def make_config(folder: Path, role: Any, changes: dict[str, Any]) -> EngineConfig:
    values: dict[str, Any] = {
        "role": role,
        "model": str(folder),
        "dtype": "fp32",
        "weight_dtype": "fp32",
        "num_kv_blocks": 128,
        "block_size": 4,
        "num_threads": 1,
        "compiled_rows": 8,
        "handoff_timeout_seconds": 60.0,
    }
    return EngineConfig(**(values | changes))
