"""A test double of an event upstream, in memory: plays the events it was given, and remembers what was asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from backends.protocol.messages import Timings, Usage
from gateway.core.errors import GatewayError, ModeUnavailable
from gateway.core.types import (
    CacheMode,
    CacheStrategy,
    ChatRequest,
    Finished,
    FinishReason,
    ModelCard,
    Started,
    StreamEvent,
    TextDelta,
)


@dataclass(frozen=True, slots=True)
class Pause:
    """A step of a script: wait here until the event is set (for ever, if nobody sets it)."""

    until: asyncio.Event


ScriptStep = StreamEvent | GatewayError | Pause


def words(*texts: str, prompt_tokens: int = 3, reason: FinishReason = FinishReason.STOP) -> list[ScriptStep]:
    """The usual script: each text is one token."""
    usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=len(texts))
    started = Started(prompt_tokens=prompt_tokens, max_tokens=100)
    return [started, *(TextDelta(text, 1) for text in texts), Finished(reason, usage, Timings())]


@dataclass(slots=True)
class ScriptedUpstream:
    """Answers every request by the same script, or by what `script` returns for it.

    A GatewayError in a script is raised at its place. `requests` are those that were begun; `aborted` and `finished`
    hold the ids of those whose stream was closed early or ran to its end.
    """

    script: Sequence[ScriptStep] | Callable[[ChatRequest], Sequence[ScriptStep]] = field(
        default_factory=lambda: words("Hello", " world")
    )
    name: str = "local"
    model: str = "scripted"
    max_model_len: int | None = 8192
    served_modes: tuple[CacheMode, ...] = (CacheMode.MERGED, CacheMode.SPLIT)
    extra: dict[str, Any] = field(default_factory=dict)  # of its model card
    variants: tuple[str, ...] = ()  # KV dtypes served as such; any other is served too
    requests: list[ChatRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    is_back: asyncio.Event = field(default_factory=asyncio.Event)  # what `back` waits for

    def models(self) -> Sequence[ModelCard]:
        return [
            ModelCard(
                self.model, self.name, max_model_len=self.max_model_len, modes=self.served_modes, extra=self.extra
            )
        ]

    def modes(self) -> Sequence[CacheMode]:
        return self.served_modes

    def variant_of(self, strategy: CacheStrategy) -> str | None:
        return strategy.kv_cache_dtype if strategy.kv_cache_dtype in self.variants else None

    async def back(self, _strategy: CacheStrategy) -> None:
        await self.is_back.wait()

    async def stream(self, request: ChatRequest) -> AsyncGenerator[StreamEvent, None]:
        mode = request.strategy.mode
        if mode not in self.served_modes:
            raise ModeUnavailable(f"Mode {mode.value!r} can't be served now: scripted so.", retry_after_seconds=1.0)
        self.requests.append(request)
        steps = self.script(request) if callable(self.script) else self.script
        ended = False
        try:
            for step in steps:
                match step:
                    case Pause(until=until):
                        await until.wait()
                    case GatewayError():
                        ended = True
                        raise step
                    case _:
                        ended = isinstance(step, Finished)
                        yield step
        finally:
            (self.finished if ended else self.aborted).append(request.request_id)
