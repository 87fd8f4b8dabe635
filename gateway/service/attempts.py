"""The attempts at one call: at the target that was chosen, again there, or at those that may stand in for it.

What comes next is `routing.retry`'s decision. Once anything of an answer has come, nothing is asked for again. Of
several failures the last one of a target that was really asked is told.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from gateway.core.errors import GatewayError, UpstreamTimeout
from gateway.core.types import CacheStrategy, Route
from gateway.records.store import AttemptRecord
from gateway.routing.breaker import Verdict
from gateway.routing.retry import Again, Failure, Reason, RetryLimits, RetryPlan, failure_of
from gateway.service.answerers import Answerer, Local
from gateway.service.answering import body_of, frames_of
from gateway.service.exchange import Exchange, Outcome
from gateway.service.guard import TargetGuard

logger = logging.getLogger(__name__)

_SILENCE = failure_of(UpstreamTimeout("No answer within the time that a request may take."))


@dataclass(frozen=True, slots=True)
class Option:
    """One way of answering: who is asked, and for which layout."""

    route: Route
    strategy: CacheStrategy

    def instead_of(self, failed: Option, failure: Failure) -> Option:
        """The same, with what it stands in for as its reason."""
        why = f"fallback from {failed.words(self)} ({failure.reason.value})"
        return Option(replace(self.route, reason=f"{why}; {self.route.reason}"), self.strategy)

    def words(self, other: Option) -> str:
        """What tells it from another one."""
        same_target = self.route.target == other.route.target
        return self.strategy.mode.value if same_target else self.route.target


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the attempts of all calls share."""

    guards: Mapping[str, TargetGuard]  # of targets that have one
    limits: RetryLimits
    count_retry: Callable[[str, str, str], None]  # from which target, to which, why
    random: Callable[[], float] = random.random
    first_is_out: Callable[[], None] = lambda: None  # called when a stream from elsewhere has sent its first frame


@dataclass(frozen=True, slots=True)
class _Told:
    """A failure and who it is of. Without its traceback, which would lead back to the call and keep it alive."""

    error: GatewayError
    route: Route
    served_mode: str | None


class Attempts:
    """A call that is understood. `stream` or `whole`, once."""

    def __init__(
        self,
        exchange: Exchange,
        options: Sequence[Option],
        make: Callable[[Option], Answerer],
        around: Surroundings,
    ) -> None:
        """Raises what is wrong with the call for the first option."""
        self._exchange = exchange
        self._options = list(options)
        self._make = make
        self._around = around
        self._num_notices = exchange.num_notices()
        self._at = 0
        self._asked = options[0]  # that option, with what it stands in for as its reason
        self._why: tuple[str, ...] = ()  # the same, for the client
        self._answerer = make(options[0])
        self._served_mode = exchange.served_mode
        self._counted: set[str] = set()  # targets whose health has suffered from this call: once is enough
        self._plan: RetryPlan | None = None
        self._last_sent: _Told | None = None
        self._started_at = time.monotonic()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Frames of the answer. Closing it cancels the generation. Errors are raised, whatever was sent before."""
        exchange = self._exchange
        while True:
            try:
                async with self._attempt() as answerer:
                    async with aclosing(frames_of(exchange, answerer)) as frames:
                        async for frame in frames:
                            is_first, exchange.begun = not exchange.begun, True
                            yield frame
                            if is_first and not isinstance(answerer, Local):
                                self._around.first_is_out()
                    return
            except GatewayError as error:
                if not await self._prepare_next(error):
                    raise self._to_tell(error) from None

    async def whole(self) -> bytes:
        """The answer as one body."""
        while True:
            try:
                async with self._attempt() as answerer:
                    return await body_of(self._exchange, answerer)
            except GatewayError as error:
                if not await self._prepare_next(error):
                    raise self._to_tell(error) from None

    # --------------------------------------------------------------------------------------------------- one attempt

    @asynccontextmanager
    async def _attempt(self) -> AsyncIterator[Answerer]:
        """Through the target's guard, who is told how it went; and so is the record."""
        exchange, option = self._exchange, self._options[self._at]
        guard = self._around.guards.get(option.route.target)
        started_at, num_sent = time.monotonic(), exchange.num_attempts
        outcome, verdict = Outcome.CLIENT_GONE.value, Verdict.NONE
        ticket = None
        try:
            exchange.on_accepted = None
            exchange.await_attempt()
            if guard is not None:
                ticket = await guard.enter()
                exchange.on_accepted = partial(guard.answered, ticket)
            exchange.begin_attempt()
            exchange.served_mode = self._served_mode
            yield self._answerer
            failure = None if exchange.error is None else failure_of(exchange.error)
            outcome, verdict = self._judge(option, failure)
        except GatewayError as error:
            failure = failure_of(error)
            outcome, verdict = self._judge(option, failure)
            if not failure.was_sent:
                exchange.num_attempts = num_sent
            raise
        except asyncio.CancelledError:
            if ticket is not None and self._is_silence():
                outcome, verdict = self._judge(option, _SILENCE)
            raise
        finally:
            if guard is not None and ticket is not None:
                guard.leave(ticket, verdict, outcome)
            seconds = time.monotonic() - started_at
            mode = option.strategy.mode.value
            exchange.attempts.append(AttemptRecord(option.route.target, mode, outcome, seconds))

    def _is_silence(self) -> bool:
        """Whether an attempt that is broken off is so because its target never began to answer.

        Not if the client has left, nor if others had most of the time that a request may take.
        """
        exchange = self._exchange
        if not exchange.is_out_of_time() or exchange.has_output or exchange.sent_to_upstream_at is None:
            return False
        now = time.monotonic()
        return now - exchange.sent_to_upstream_at >= (now - self._started_at) / 2

    def _judge(self, option: Option, failure: Failure | None) -> tuple[str, Verdict]:
        if failure is None:
            return Outcome.OK.value, Verdict.SUCCESS
        target, verdict = option.route.target, failure.verdict
        if verdict is Verdict.FAILURE and target in self._counted:
            verdict = Verdict.NONE
        if verdict is Verdict.FAILURE:
            self._counted.add(target)
        return failure.reason.value, verdict

    # --------------------------------------------------------------------------------------------------- what is next

    async def _prepare_next(self, error: GatewayError) -> bool:
        """Wait until the next attempt is due. False if there is none: the error is the answer."""
        exchange = self._exchange
        if exchange.has_output or exchange.error is not None:
            return False
        failure, failed = failure_of(error), self._at
        if failure.was_sent:
            self._last_sent = _Told(error.with_traceback(None), self._options[failed].route, exchange.served_mode)
        plan = self._plan = self._plan or self._new_plan()
        stay = exchange.headers_sent  # they name who answers, and how
        again = plan.failed(failed, failure, time.monotonic(), stay=stay)
        again = self._go_to(plan, again, failed, failure)
        if again is None:
            return False
        before, after = self._options[failed].route.target, self._options[again.option].route.target
        if failure.reason is not Reason.RESTARTING or self._last_sent is None:  # else the death itself was counted
            self._around.count_retry(before, after, failure.reason.value)
        request_id, wait = exchange.call.request_id, again.delay_seconds
        when = "once it is back, within" if again.when_back else "in"
        logger.warning(
            "request %s: %s failed (%s); %s %s %.2f s", request_id, before, failure.reason, after, when, wait
        )
        if again.when_back:
            return await self._is_back(wait)
        if wait > 0:
            await asyncio.sleep(wait)
        return True

    def _new_plan(self) -> RetryPlan:
        around = self._around
        return RetryPlan(len(self._options), around.limits, started_at=self._started_at, random=around.random)

    async def _is_back(self, max_seconds: float) -> bool:
        """Wait for an engine that is being started again. False if that takes too long."""
        answerer, strategy = self._answerer, self._options[self._at].strategy
        assert isinstance(answerer, Local), "only an engine says of itself that it is being started again"
        since = time.monotonic()
        try:
            async with asyncio.timeout(max_seconds):
                await answerer.upstream.back(strategy)
        except TimeoutError:
            return False
        seconds = time.monotonic() - since
        self._exchange.note((f"the engine was being started again: waited {seconds:.1f} s for it",))
        return True

    def _to_tell(self, error: GatewayError) -> GatewayError:
        """Why the answer fails: that a target isn't asked any more says less than why it failed when it was."""
        last = self._last_sent
        if last is None or failure_of(error).was_sent:
            return error
        self._exchange.route, self._exchange.served_mode = last.route, last.served_mode
        self._exchange.drop_notices(self._num_notices)
        return last.error

    def _go_to(self, plan: RetryPlan, again: Again | None, failed: int, failure: Failure) -> Again | None:
        """Make the answerer of the option that was decided on, or of the next one that can be asked this."""
        exchange = self._exchange
        unfit: list[str] = []  # why others can't be asked
        while again is not None and (unfit or again.option != failed):
            option = self._asked  # once more, unless another one is next
            if again.option != failed:
                option = self._options[again.option].instead_of(self._options[failed], failure)
            exchange.drop_notices(self._num_notices)
            try:
                self._answerer = self._make(option)
            except GatewayError as error:
                exchange.route = self._asked.route
                unfit.append(f"{option.words(self._asked)} could not stand in: {error.message}")
                again = plan.unsuitable(again.option, time.monotonic())
                continue
            if option is not self._asked:
                self._why = (f"answered by {option.words(self._asked)}, since {self._asked.words(option)} failed",)
            exchange.note(self._why)
            self._at, self._asked, self._served_mode = again.option, option, exchange.served_mode
            break
        exchange.note(unfit)
        return again
