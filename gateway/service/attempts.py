"""The attempts at one call: at the target that was chosen, again there, or at those that may stand in for it.

What comes next is `routing.retry`'s decision. Once anything of an answer has come, nothing is asked for again.
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

from gateway.core.errors import GatewayError
from gateway.core.types import CacheStrategy, Route
from gateway.records.store import AttemptRecord
from gateway.routing.breaker import Verdict
from gateway.routing.retry import Again, Failure, RetryLimits, RetryPlan, failure_of
from gateway.service.answerers import Answerer
from gateway.service.answering import body_of, frames_of
from gateway.service.exchange import Exchange, Outcome
from gateway.service.guard import TargetGuard

logger = logging.getLogger(__name__)


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
        self._answerer = make(options[0])
        self._served_mode = exchange.served_mode
        self._counted: set[str] = set()  # targets whose health has suffered from this call: once is enough
        self._plan: RetryPlan | None = None
        self._started_at = time.monotonic()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Frames of the answer. Closing it cancels the generation. Errors are raised, whatever was sent before."""
        exchange = self._exchange
        while True:
            try:
                async with self._attempt(exchange.call.dialect.stream_type) as answerer:
                    async with aclosing(frames_of(exchange, answerer)) as frames:
                        async for frame in frames:
                            exchange.begun = True
                            yield frame
                    return
            except GatewayError as error:
                if not await self._prepare_next(error):
                    raise

    async def whole(self) -> bytes:
        """The answer as one body."""
        while True:
            try:
                async with self._attempt("application/json") as answerer:
                    return await body_of(self._exchange, answerer)
            except GatewayError as error:
                if not await self._prepare_next(error):
                    raise

    # --------------------------------------------------------------------------------------------------- one attempt

    @asynccontextmanager
    async def _attempt(self, content_type: str) -> AsyncIterator[Answerer]:
        """Through the target's guard, who is told how it went; and so is the record."""
        exchange, option = self._exchange, self._options[self._at]
        guard = self._around.guards.get(option.route.target)
        started_at = time.monotonic()
        outcome, verdict = Outcome.CLIENT_GONE.value, Verdict.NONE
        ticket = None
        try:
            exchange.on_accepted = None
            if guard is not None:
                ticket = await guard.enter()
                exchange.on_accepted = partial(guard.answered, ticket)
            exchange.begin_attempt(content_type)
            exchange.served_mode = self._served_mode
            yield self._answerer
            failure = None if exchange.error is None else failure_of(exchange.error)
            outcome, verdict = self._judge(option, failure)
        except GatewayError as error:
            outcome, verdict = self._judge(option, failure_of(error))
            raise
        finally:
            if guard is not None and ticket is not None:
                guard.leave(ticket, verdict, outcome)
            seconds = time.monotonic() - started_at
            mode = option.strategy.mode.value
            exchange.attempts.append(AttemptRecord(option.route.target, mode, outcome, seconds))

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
        if self._plan is None:
            self._plan = RetryPlan(
                len(self._options),
                self._around.limits,
                started_at=self._started_at,
                random=self._around.random,
            )
        stay = exchange.headers_sent  # they name who answers, and how
        again = self._plan.failed(failed, failure, time.monotonic(), stay=stay)
        again = self._go_to(self._plan, again, failed, failure)
        if again is None:
            return False
        before, after = self._options[failed].route.target, self._options[again.option].route.target
        self._around.count_retry(before, after, failure.reason.value)
        request_id, wait = exchange.call.request_id, again.delay_seconds
        logger.warning("request %s: %s failed (%s); %s in %.2f s", request_id, before, failure.reason, after, wait)
        if wait > 0:
            await asyncio.sleep(wait)
        return True

    def _go_to(self, plan: RetryPlan, again: Again | None, failed: int, failure: Failure) -> Again | None:
        """Make the answerer of the option that was decided on, or of the next one that can be asked this."""
        exchange, before = self._exchange, self._options[failed]
        is_made = True  # the answerer, of the option that failed
        while again is not None and not (is_made and again.option == failed):
            option = self._options[again.option].instead_of(before, failure)
            exchange.drop_notices(self._num_notices)
            try:
                self._answerer = self._make(option)
            except GatewayError:
                is_made, exchange.route = False, before.route
                again = plan.unsuitable(again.option, time.monotonic())
                continue
            exchange.note((f"answered by {option.words(before)}, since {before.words(option)} failed",))
            self._at, self._served_mode = again.option, exchange.served_mode
            return again
        return again
