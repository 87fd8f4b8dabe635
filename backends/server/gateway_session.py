"""What the gateway asks of an instance, and the answers that need no engine. Lives on the asyncio loop.

Requests are prepared in worker threads, admitted in the engine thread; an abort overtakes both.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Protocol, assert_never

import msgspec

from backends.core.request import Request
from backends.engines.base import RequestRefused
from backends.protocol.messages import (
    Abort,
    Alive,
    CountTokens,
    Drain,
    EngineStats,
    Failed,
    Generate,
    GetStats,
    Ping,
    ResetPeaks,
    Role,
    StatsReport,
    ToEngine,
    TokenCount,
)
from backends.server.engine_thread import EngineThread, Liveness
from backends.server.preparation import Preparer

logger = logging.getLogger(__name__)
LOOK_AGAIN_SECONDS = 0.2  # at an engine thread that has not moved
Send = Callable[[msgspec.Struct], None]


class ObservedEngine(Protocol):
    """What every role offers to the gateway."""

    def stats(self) -> EngineStats: ...

    def reset_peaks(self, *, clear_prefix_cache: bool) -> None: ...


class RequestTaker(Protocol):
    """What merged and decode offer beyond it."""

    def submit(self, request: Request) -> None: ...

    def abort(self, request_id: str) -> None: ...


class GatewaySession:
    """Answers the gateway's messages.

    `send` is for this loop, `send_from_engine` for the engine thread. A prefill side has no `taker` and `preparer`.
    """

    def __init__(
        self,
        *,
        role: Role,
        engine: ObservedEngine,
        taker: RequestTaker | None,
        preparer: Preparer | None,
        thread: EngineThread,
        send: Send,
        send_from_engine: Send,
        encoders: Executor,
    ) -> None:
        self._role = role
        self._engine = engine
        self._taker = taker
        self._preparer = preparer
        self._thread = thread
        self._send = send
        self._send_from_engine = send_from_engine
        self._encoders = encoders
        self._preparing: dict[str, asyncio.Future[Request]] = {}
        self._draining = False
        self._liveness = Liveness(thread.pulse)

    def received(self, message: ToEngine) -> None:
        match message:
            case Generate():
                self._generate(message)
            case Abort(request_id=request_id):
                self._abort(request_id)
            case GetStats(number=number):
                self._thread.post(partial(self._report_stats, number))
            case ResetPeaks():
                self._thread.post(partial(self._reset_peaks, message))
            case Ping(number=number):
                self._say_alive(number)
            case CountTokens():
                self._count_tokens(message)
            case Drain():
                self.drain()
            case _:
                assert_never(message)

    @property
    def draining(self) -> bool:
        return self._draining

    def drain(self) -> None:
        """Refuse what is new, finish what runs, then let the engine thread end."""
        self._draining = True
        self._stop_thread_if_drained()

    # ------------------------------------------------------------------------------------------------- on the loop

    def _generate(self, generate: Generate) -> None:
        if self._preparer is None or self._taker is None:
            message = f"A {self._role} instance takes no requests of clients."
            self._send(Failed(request_id=generate.request_id, code="internal", message=message))
            return
        if self._draining:
            message = "The engine is shutting down and takes no new requests."
            self._send(Failed(request_id=generate.request_id, code="draining", message=message))
            return
        work = partial(self._preparer.prepare, generate, time.monotonic())
        future = asyncio.get_running_loop().run_in_executor(self._encoders, work)
        self._preparing[generate.request_id] = future
        future.add_done_callback(partial(self._prepared, generate.request_id, self._taker))

    def _prepared(self, request_id: str, taker: RequestTaker, future: asyncio.Future[Request]) -> None:
        if self._preparing.get(request_id) is not future:
            if not future.cancelled():
                future.exception()  # seen: an aborted request has nobody to tell
            return
        del self._preparing[request_id]
        error = future.exception()
        if error is None:
            self._thread.post(partial(self._submit, taker, future.result()))
        else:
            self._send(failure(request_id, error, "preparing"))
        self._stop_thread_if_drained()

    def _say_alive(self, number: int) -> None:
        if self._liveness.moved():
            self._send(Alive(number=number))
        else:
            asyncio.get_running_loop().call_later(LOOK_AGAIN_SECONDS, self._say_alive, number)

    def _count_tokens(self, question: CountTokens) -> None:
        if self._preparer is None:
            message = f"A {self._role} instance counts no tokens."
            refusal = Failed(request_id="", code="internal", message=message)
            self._send(TokenCount(number=question.number, failed=refusal))
            return
        work = partial(self._preparer.count, question.prompt)
        future = asyncio.get_running_loop().run_in_executor(self._encoders, work)
        future.add_done_callback(partial(self._counted, question.number))

    def _counted(self, number: int, future: asyncio.Future[int]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self._send(TokenCount(number=number, prompt_tokens=future.result()))
        else:
            self._send(TokenCount(number=number, failed=failure(f"count {number}", error, "counting the tokens of")))

    def _abort(self, request_id: str) -> None:
        future = self._preparing.pop(request_id, None)
        if future is not None:
            future.cancel()
            self._stop_thread_if_drained()
        elif self._taker is not None:
            self._thread.post(partial(self._taker.abort, request_id))

    def _stop_thread_if_drained(self) -> None:
        if self._draining and not self._preparing:
            self._thread.stop_when_idle()

    # ---------------------------------------------------------------------------------------- in the engine thread

    def _submit(self, taker: RequestTaker, request: Request) -> None:
        try:
            taker.submit(request)
        except RequestRefused as refusal:
            self._send_from_engine(failure(request.request_id, refusal, "admitting"))
        except Exception as error:  # one request's trouble must not end the others
            taker.abort(request.request_id)
            self._send_from_engine(failure(request.request_id, error, "admitting"))

    def _report_stats(self, number: int) -> None:
        self._send_from_engine(StatsReport(number=number, stats={self._role: self._engine.stats()}))

    def _reset_peaks(self, message: ResetPeaks) -> None:
        self._engine.reset_peaks(clear_prefix_cache=message.clear_prefix_cache)
        self._report_stats(message.number)


def failure(request_id: str, error: BaseException, doing: str) -> Failed:
    """What the gateway hears of an exception: a refusal in its own words, a bug only as such."""
    if isinstance(error, RequestRefused):
        return Failed(request_id=request_id, code=error.code, message=str(error), param=error.param)
    logger.error("request %s failed while %s it", request_id, doing, exc_info=error)
    message = f"The engine failed while {doing} the request ({type(error).__name__}); its log has the details."
    return Failed(request_id=request_id, code="internal", message=message)
