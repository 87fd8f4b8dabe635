"""Requests and questions to one engine process, over its link. Knows nothing of processes or restarts."""

from __future__ import annotations

import asyncio
import itertools
import logging

import msgspec

from backends.protocol.link import FrameLink
from backends.protocol.messages import (
    Abort,
    Accepted,
    Alive,
    CountTokens,
    Done,
    Drain,
    EngineStats,
    Failed,
    FromEngine,
    Generate,
    GetStats,
    PeerState,
    Ping,
    Prompt,
    Ready,
    ResetPeaks,
    StartFailed,
    StatsReport,
    ToEngine,
    TokenChunk,
    TokenCount,
)
from gateway.core.errors import InvalidRequest, UpstreamGone

logger = logging.getLogger(__name__)

Answer = Accepted | TokenChunk | Done | Failed
Report = StatsReport | TokenCount | Alive
LifeSign = Ready | StartFailed | PeerState


class RequestChannel:
    """The answers to one request, in order.

    What the reader has not taken is kept: at most one small message for each token, so max_tokens bounds it.
    """

    def __init__(self, connection: EngineConnection, request_id: str) -> None:
        self._connection = connection
        self._request_id = request_id
        self._answers: asyncio.Queue[Answer | UpstreamGone] = asyncio.Queue()
        self._finished = False

    def put(self, answer: Answer | UpstreamGone) -> None:
        if isinstance(answer, (Done, Failed, UpstreamGone)):
            self._finished = True
        self._answers.put_nowait(answer)

    async def next(self) -> Answer:
        """Raises `UpstreamGone` once the engine has died and everything that it said before was taken."""
        answer = await self._answers.get()
        if isinstance(answer, UpstreamGone):
            raise answer
        return answer

    def close(self) -> None:
        """Aborts the request if the engine still works on it."""
        self._connection.forget(self._request_id, abort=not self._finished)


class EngineConnection:
    """Sorts what an engine says to those who wait for it."""

    def __init__(self, link: FrameLink[FromEngine], name: str) -> None:
        self._link = link
        self._name = name
        self._channels: dict[str, RequestChannel] = {}
        self._questions: dict[int, asyncio.Future[Report]] = {}
        self._numbers = itertools.count(1)
        self._last_stats: tuple[float, EngineStats] | None = None

    def open(self, generate: Generate) -> RequestChannel:
        channel = RequestChannel(self, generate.request_id)
        self._channels[generate.request_id] = channel
        try:
            self._say(generate)
        except InvalidRequest:
            del self._channels[generate.request_id]
            raise
        return channel

    def forget(self, request_id: str, *, abort: bool) -> None:
        self._channels.pop(request_id, None)
        if abort:
            self._link.send(Abort(request_id=request_id))

    def last_stats(self) -> EngineStats | None:
        """The newest figures that the instance has ever given, with their age."""
        if self._last_stats is None:
            return None
        at, stats = self._last_stats
        return msgspec.structs.replace(stats, stale_seconds=asyncio.get_running_loop().time() - at)

    async def stats(self) -> EngineStats:
        number = next(self._numbers)
        return _stats(await self._ask(number, GetStats(number=number)))

    async def ping(self) -> None:
        """Return once the engine thread is seen to move: it may be in a long step, but it isn't stuck."""
        number = next(self._numbers)
        await self._ask(number, Ping(number=number))

    async def reset_peaks(self, *, clear_prefix_cache: bool) -> EngineStats:
        number = next(self._numbers)
        return _stats(await self._ask(number, ResetPeaks(number=number, clear_prefix_cache=clear_prefix_cache)))

    async def count_tokens(self, prompt: Prompt) -> TokenCount:
        """How long the prompt is, or why it can't be encoded."""
        number = next(self._numbers)
        answer = await self._ask(number, CountTokens(number=number, prompt=prompt))
        assert isinstance(answer, TokenCount)
        return answer

    def drain(self) -> None:
        self._link.send(Drain())

    def close(self) -> None:
        self._link.close()

    def take(self, answer: Answer | Report) -> None:
        """Answers to what nobody waits for any more are dropped."""
        if isinstance(answer, StatsReport):
            self._last_stats = (asyncio.get_running_loop().time(), _stats(answer))
        if isinstance(answer, Report):
            question = self._questions.pop(answer.number, None)
            if question is not None and not question.done():
                question.set_result(answer)
            return
        channel = self._channels.get(answer.request_id)
        if channel is not None:
            channel.put(answer)

    def lost(self, reason: str) -> None:
        """Everyone who waits hears of it at once."""
        self._last_stats = None
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.put(self._gone(reason))
        questions, self._questions = self._questions, {}
        for question in questions.values():
            if not question.done():
                question.set_exception(self._gone(reason))

    async def _ask(self, number: int, message: ToEngine) -> Report:
        if not self._link.is_open:
            raise self._gone("its connection ended")
        question: asyncio.Future[Report] = asyncio.get_running_loop().create_future()
        self._questions[number] = question
        try:
            self._say(message)
            return await question
        finally:
            self._questions.pop(number, None)

    def _say(self, message: ToEngine) -> None:
        """Raises `InvalidRequest` for a number within a client's schema or message that the link has no room for."""
        try:
            self._link.send(message)
        except OverflowError:
            raise InvalidRequest(
                "`messages` or `tools` have a whole number that needs more than 64 bits. Send a smaller one, or text."
            ) from None

    def _gone(self, reason: str) -> UpstreamGone:
        return UpstreamGone(f"The {self._name} engine process is gone: {reason}. It is being restarted; try again.")


def _stats(answer: Report) -> EngineStats:
    assert isinstance(answer, StatsReport), "an engine answers what it was asked"
    return next(iter(answer.stats.values()))
