"""From sampled tokens to what a client is told: text, the end, usage and timings. Knows no scheduler and no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from backends.core.outputs import LENGTH, Ending, ending_by_length, ending_by_stop_token
from backends.core.request import Request
from backends.engines.base import Emit
from backends.engines.logprobs import Spell, prompt_logprobs, token_logprob
from backends.protocol.messages import Done, Failed, FailureCode, Role, Timings, TokenChunk, TokenLogprob, Usage
from backends.text.grammar import GrammarFailed


class Detokenizer(Protocol):
    """Turns one answer's tokens into text, holding back what may still become a stop string or a character."""

    @property
    def matched_stop(self) -> str | None: ...

    @property
    def num_characters(self) -> int:
        """Decoded so far, given out or held back."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


DetokenizerFactory = Callable[[Request], Detokenizer]
CompleteTimings = Callable[[Request, Timings], Timings]


@dataclass(slots=True)
class _Answer:
    request: Request
    detokenizer: Detokenizer
    peak_kv_blocks: int = 0
    begun: bool = False


class OutputProcessor:
    """The answers that are being written.

    Every sampled token is emitted in one `TokenChunk` and counted, the end mark too (with no text of its own). Its
    logprobs, if asked for, go with it, whether its text is held back or not. `spell` writes single tokens for them.
    `max_num_tokens` is what the KV pool can hold of one request; `complete_timings` lets an engine add what only it
    knows.
    """

    def __init__(
        self,
        *,
        role: Role,
        detokenizer_factory: DetokenizerFactory,
        emit: Emit,
        max_num_tokens: int,
        peak_memory_bytes: Callable[[], int],
        complete_timings: CompleteTimings = lambda _, timings: timings,
        spell: Spell = lambda token_id: (f"<{token_id}>", None),
    ) -> None:
        self._role = role
        self._detokenizer_factory = detokenizer_factory
        self._emit = emit
        self._max_num_tokens = max_num_tokens
        self._peak_memory_bytes = peak_memory_bytes
        self._complete_timings = complete_timings
        self._spell = spell
        self._answers: dict[str, _Answer] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._answers

    def __len__(self) -> int:
        return len(self._answers)

    def requests(self) -> list[Request]:
        return [answer.request for answer in self._answers.values()]

    def add(self, request: Request) -> None:
        self._answers[request.request_id] = _Answer(request, self._detokenizer_factory(request))

    def drop(self, request_id: str) -> None:
        """Forget an answer; nothing more is emitted for it. Unknown ids are ignored."""
        self._answers.pop(request_id, None)

    def observe_blocks_in_use(self, num_blocks: int) -> None:
        """Every living request remembers the most blocks that were in use while it lived."""
        for answer in self._answers.values():
            answer.peak_kv_blocks = max(answer.peak_kv_blocks, num_blocks)

    def process(self, request: Request) -> bool:
        """Tell of the request's newest token. True: that ended the answer, and `Done` or `Failed` was emitted."""
        answer = self._answers[request.request_id]
        if not answer.begun:
            answer.begun = True
            self._echo(request)
            if request.max_tokens == 0:  # the prompt was computed for its own sake
                request.output_token_ids.clear()
                self._finish(answer, LENGTH)
                return True
        try:
            ending = self._tell(answer)
        except GrammarFailed as error:
            self.fail(request.request_id, "invalid_request", str(error))
            return True
        if ending is None:
            return False
        self._finish(answer, ending)
        return True

    def _tell(self, answer: _Answer) -> Ending | None:
        request, detokenizer = answer.request, answer.detokenizer
        token_id = request.output_token_ids[-1]
        ending = ending_by_stop_token(request)
        hidden = ending is not None and ending.hides_token
        if ending is None and request.grammar is not None and request.grammar.is_complete(request.output_token_ids):
            ending = Ending("stop")
        logprobs = None if request.sampling.logprobs is None else self._logprobs(answer, hidden=hidden)
        text = "" if hidden else detokenizer.push(token_id)
        self._emit(TokenChunk(request_id=request.request_id, text=text, token_ids=[token_id], logprobs=logprobs))
        if ending is None and detokenizer.matched_stop is not None:
            ending = Ending("stop", detokenizer.matched_stop)
        return ending or ending_by_length(request, self._max_num_tokens)

    def _echo(self, request: Request) -> None:
        echo = request.echo
        if echo is None:
            return
        logprobs = None
        if echo.offsets:
            logprobs = prompt_logprobs(request.prompt_token_ids, request.prompt_scores, echo.offsets, self._spell)
        self._emit(TokenChunk(request_id=request.request_id, text=echo.text, token_ids=[], logprobs=logprobs))

    def _logprobs(self, answer: _Answer, *, hidden: bool) -> list[TokenLogprob]:
        """Of the newest token, which the detokenizer hasn't seen yet. An end mark is no part of the text."""
        if hidden:
            return []
        echo = answer.request.echo
        offset = answer.detokenizer.num_characters + (len(echo.text) if echo else 0)
        return [token_logprob(answer.request.output_scores[-1], offset, self._spell)]

    def fail(self, request_id: str, code: FailureCode, message: str) -> None:
        """End an answer by `Failed`. Unknown ids are ignored."""
        if self._answers.pop(request_id, None) is not None:
            self._emit(Failed(request_id=request_id, code=code, message=message))

    def _finish(self, answer: _Answer, ending: Ending) -> None:
        request = answer.request
        del self._answers[request.request_id]
        text = answer.detokenizer.finish()
        matched = answer.detokenizer.matched_stop  # text that was held back may have been a whole stop string
        if ending.reason == "length" and matched is not None:
            ending = Ending("stop", matched)
        self._emit(
            Done(
                request_id=request.request_id,
                finish_reason=ending.reason,
                usage=_usage(request),
                timings=self._timings(answer),
                text=text,
                stop_reason=ending.stop_reason,
            )
        )

    def _timings(self, answer: _Answer) -> Timings:
        request = answer.request
        timings = Timings(
            queue_seconds=_seconds(request.arrived_at, request.first_scheduled_at),
            prefill_seconds=_seconds(request.first_scheduled_at, request.first_token_at),
            decode_seconds=_seconds(request.first_token_at, request.last_token_at),
            num_preemptions=request.num_preemptions,
            peak_kv_blocks={self._role: answer.peak_kv_blocks},
            peak_memory_bytes={self._role: self._peak_memory_bytes()},
        )
        return self._complete_timings(request, timings)


def _usage(request: Request) -> Usage:
    return Usage(
        prompt_tokens=request.num_prompt_tokens,
        completion_tokens=len(request.output_token_ids),
        cached_tokens=request.num_cached_tokens or 0,
    )


def _seconds(start: float | None, end: float | None) -> float:
    """A phase's length; 0 if it did not happen."""
    if start is None or end is None:
        return 0.0
    return max(end - start, 0.0)
