"""Several answers to one prompt: one request of the gateway becomes `n` of the engine. Knows no sockets, no torch.

The first choice computes the prompt; the others follow when it has its first token, and find the prompt in the prefix
cache where that is on. The client hears of one request: one `Accepted`, chunks by index, and one `Done` with the usage
of all, the prompt counted once. One that fails ends them all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec

from backends.core.errors import RequestRefused
from backends.core.request import Request
from backends.engines.base import Emit
from backends.protocol.messages import Accepted, Done, Failed, FromEngine, TokenChunk, Usage

Post = Callable[[Callable[[], None]], None]


class RequestTaker(Protocol):
    """What takes single requests."""

    def submit(self, request: Request) -> None: ...

    def abort(self, request_id: str) -> None: ...


@dataclass(slots=True)
class _Group:
    """A request with several choices."""

    request: Request  # as the gateway sent it
    first: Request
    running: set[int] = field(default_factory=lambda: {0})
    waiting: list[int] = field(default_factory=list)
    first_token_at: float | None = None
    completion_tokens: int = 0
    first_done: Done | None = None


class Choices:
    """Stands between the server and an engine: requests go in through it, and `emit` is what the engine speaks to.

    All of it happens in the engine thread. `post` runs a call there before the next step: an engine is not called from
    inside its own.
    """

    def __init__(self, emit: Emit, post: Post, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._emit = emit
        self._post = post
        self._clock = clock
        self._taker: RequestTaker | None = None
        self._groups: dict[str, _Group] = {}
        self._members: dict[str, tuple[str, int]] = {}  # the engine's request id -> the gateway's, index
        self._blocked: set[str] = set()  # groups that found the queue full

    def attach(self, taker: RequestTaker) -> None:
        self._taker = taker

    def submit(self, request: Request) -> None:
        """As of an engine: emits `Accepted`, or raises `RequestRefused`."""
        if request.sampling.n == 1:
            self._engine.submit(request)
            return
        first = _member(request, request, 0)
        group = _Group(request, first, waiting=list(range(1, request.sampling.n)))
        self._groups[request.request_id] = group
        self._members[first.request_id] = (request.request_id, 0)
        try:
            self._engine.submit(first)
        except BaseException:
            self._forget(request.request_id)
            raise

    def abort(self, request_id: str) -> None:
        group = self._forget(request_id)
        if group is None:
            self._engine.abort(request_id)
            return
        for index in group.running:
            self._engine.abort(_member_id(request_id, index))

    def emit(self, message: FromEngine) -> None:
        """What the engine says."""
        if not self._members:
            self._emit(message)
            return
        member = self._members.get(getattr(message, "request_id", ""))
        if member is None:
            self._emit(message)
        else:
            self._of_member(message, *member)
        for request_id in self._blocked:  # something has moved: there may be room now
            self._post(partial(self._submit_others, request_id))
        self._blocked.clear()

    @property
    def _engine(self) -> RequestTaker:
        assert self._taker is not None
        return self._taker

    def _of_member(self, message: FromEngine, request_id: str, index: int) -> None:
        group = self._groups[request_id]
        match message:
            case Accepted():
                if index == 0:
                    self._emit(msgspec.structs.replace(message, request_id=request_id))
            case TokenChunk():
                self._emit(msgspec.structs.replace(message, request_id=request_id, index=index))
                if group.first_token_at is None:
                    group.first_token_at = self._clock()
                    self._post(partial(self._submit_others, request_id))
            case Done():
                self._choice_done(group, message, index)
            case Failed():
                self._fail(group, message)
            case _:
                self._emit(message)

    def _submit_others(self, request_id: str) -> None:
        group = self._groups.get(request_id)
        while group is not None and group.waiting:
            index = group.waiting[0]
            member = _member(group.request, group.first, index)
            self._members[member.request_id] = (request_id, index)
            group.running.add(index)
            try:
                self._engine.submit(member)
            except RequestRefused as refused:
                group.running.discard(index)
                del self._members[member.request_id]
                if refused.code == "queue_full":
                    self._blocked.add(request_id)
                    return
                self._fail(group, Failed(request_id=request_id, code=refused.code, message=str(refused)))
                return
            group.waiting.pop(0)

    def _choice_done(self, group: _Group, done: Done, index: int) -> None:
        request_id = group.request.request_id
        group.running.discard(index)
        group.completion_tokens += done.usage.completion_tokens
        del self._members[_member_id(request_id, index)]
        if index == 0:
            group.first_done = done
        if group.running or group.waiting:
            self._emit(
                TokenChunk(
                    request_id=request_id,
                    index=index,
                    text=done.text,
                    token_ids=[],
                    finish_reason=done.finish_reason,
                    stop_reason=done.stop_reason,
                )
            )
            return
        del self._groups[request_id]
        self._emit(self._all_done(group, done, index))

    def _all_done(self, group: _Group, done: Done, index: int) -> Done:
        """The prompt's part is the first choice's; decoding is from the first token to the last one of any choice."""
        first = group.first_done
        assert first is not None
        assert group.first_token_at is not None
        seconds = self._clock() - group.first_token_at
        return Done(
            request_id=group.request.request_id,
            finish_reason=done.finish_reason,
            usage=Usage(
                prompt_tokens=first.usage.prompt_tokens,
                completion_tokens=group.completion_tokens,
                cached_tokens=first.usage.cached_tokens,
            ),
            timings=msgspec.structs.replace(first.timings, decode_seconds=seconds),
            text=done.text,
            stop_reason=done.stop_reason,
            index=index,
        )

    def _fail(self, group: _Group, failed: Failed) -> None:
        request_id = group.request.request_id
        failing = self._members.get(failed.request_id, ("", -1))[1]
        self._forget(request_id)
        for index in group.running - {failing}:
            self._post(partial(self._engine.abort, _member_id(request_id, index)))
        self._emit(msgspec.structs.replace(failed, request_id=request_id))

    def _forget(self, request_id: str) -> _Group | None:
        group = self._groups.pop(request_id, None)
        self._blocked.discard(request_id)
        if group is not None:
            for index in group.running:
                self._members.pop(_member_id(request_id, index), None)
        return group


def _member_id(request_id: str, index: int) -> str:
    return f"{request_id}:{index}"


def _member(request: Request, first: Request, index: int) -> Request:
    """One choice. The first one scores the prompt for all."""
    sampling = msgspec.structs.replace(request.sampling, n=1)
    if index > 0:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
    return dataclasses.replace(
        request,
        request_id=_member_id(request.request_id, index),
        sampling=sampling,
        seed=choice_seed(request.seed, index),
        grammar=None if request.grammar is None else request.grammar.fresh(),
        output_token_ids=[],
        output_scores=[],
        prompt_scores=first.prompt_scores,
        blocks=[],
    )


def choice_seed(seed: int, index: int) -> int:
    """The first choice is what n = 1 would answer."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
