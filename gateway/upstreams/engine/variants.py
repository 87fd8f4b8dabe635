"""Engine variants: carries out what their state machine decides, with one fleet of instances for each that runs."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gateway.core.errors import GatewayError, ModeUnavailable, Overloaded
from gateway.core.types import CacheMode
from gateway.upstreams.engine.availability import given_up, takers, why_not
from gateway.upstreams.engine.fleet import Fleet
from gateway.upstreams.engine.pairs import PairReport
from gateway.upstreams.engine.variant_events import (
    Ask,
    Broke,
    CameUp,
    Effect,
    Event,
    Grant,
    Leave,
    Refuse,
    Shutdown,
    StartVariant,
    Stopped,
    StopVariant,
    Tick,
    VariantKey,
)
from gateway.upstreams.engine.variant_machine import VariantMachine, VariantPolicy, VariantSnapshot, VariantState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VariantInstance:
    """One process of a variant, as /ready shows it."""

    name: str
    state: str
    reason: str
    pid: int | None
    num_restarts: int


@dataclass(frozen=True, slots=True)
class VariantReport:
    """One variant, running or not, as /ready shows it."""

    name: str
    mode: CacheMode
    kv_cache_dtype: str
    state: VariantState
    reason: str
    num_requests: int
    num_waiting: int
    kv_pool_bytes: int
    instances: tuple[VariantInstance, ...]
    pairs: tuple[PairReport, ...] = ()


class EngineVariants:
    """Starts a variant when it is first asked for, stops it when it is idle. `close` it in any case."""

    def __init__(
        self,
        keys: Iterable[VariantKey],
        policy: VariantPolicy,
        *,
        make_fleet: Callable[[VariantKey], Fleet],
        cost: str,
        stop_seconds: float,
    ) -> None:
        self._machine = VariantMachine(tuple(keys), policy)
        self._make_fleet = make_fleet
        self._cost = cost
        self._stop_seconds = stop_seconds
        self._fleets: dict[VariantKey, Fleet] = {}
        self._watchers: dict[VariantKey, asyncio.Task[None]] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._answers: dict[int, asyncio.Future[Fleet | Refuse]] = {}
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False

    @asynccontextmanager
    async def lease(self, key: VariantKey) -> AsyncIterator[Fleet]:
        """The variant's instances, started if need be; they are not stopped before the end of the block.

        Raises ModeUnavailable if it can't be started, Overloaded if all places are in use.
        """
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._handle(Ask(number, key))
            decision = await answer
            if isinstance(decision, Refuse):
                raise error_of(decision, key)
            yield decision
        finally:
            del self._answers[number]
            self._handle(Leave(number))

    def stop_soon(self) -> None:
        """`close` will follow: from now on an end is not a failure."""
        self._closing = True
        for fleet in self._fleets.values():
            fleet.stop_soon()

    async def close(self) -> None:
        """Finish what runs within the time for it; returns when no process is left."""
        self._handle(Shutdown())
        while self._stopping:
            await asyncio.wait(set(self._stopping))
        if self._timer is not None:
            self._timer.cancel()

    def fleets(self) -> Mapping[VariantKey, Fleet]:
        """Those that have processes."""
        return self._fleets

    def reports(self) -> list[VariantReport]:
        return [self._report(snapshot) for snapshot in self._machine.snapshots()]

    def _report(self, snapshot: VariantSnapshot) -> VariantReport:
        key = snapshot.key
        fleet = self._fleets.get(key)
        return VariantReport(
            name=str(key),
            mode=key.mode,
            kv_cache_dtype=key.kv_cache_dtype,
            state=snapshot.state,
            reason=snapshot.reason,
            num_requests=snapshot.num_requests,
            num_waiting=snapshot.num_waiting,
            kv_pool_bytes=kv_pool_bytes(fleet) if fleet is not None else 0,
            instances=instances_of(fleet) if fleet is not None else (),
            pairs=tuple(fleet.pairs()) if fleet is not None else (),
        )

    # -------------------------------------------------------------------------------------------- events and effects

    def _handle(self, event: Event) -> None:
        loop = asyncio.get_running_loop()
        for effect in self._machine.handle(event, loop.time()):
            self._carry_out(effect)
        if self._timer is not None:
            self._timer.cancel()
        deadline = self._machine.deadline()
        self._timer = None if deadline is None else loop.call_at(deadline, self._handle, Tick())

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case StartVariant(key=key):
                self._start(key)
            case StopVariant(key=key, reason=reason):
                self._stop(key, reason)
            case Grant(waiter=waiter, key=key):
                self._answer(waiter, self._fleets[key])
            case Refuse(waiter=waiter):
                self._answer(waiter, effect)

    def _answer(self, waiter: int, decision: Fleet | Refuse) -> None:
        answer = self._answers.get(waiter)
        if answer is not None and not answer.done():  # else its client has left; its Leave follows
            answer.set_result(decision)

    def _start(self, key: VariantKey) -> None:
        logger.info("engine variant %s: starting, in addition to the main engine: %s", key, self._cost)
        fleet = self._fleets[key] = self._make_fleet(key)
        self._watchers[key] = asyncio.get_running_loop().create_task(self._watch(key, fleet), name=f"variant {key}")

    async def _watch(self, key: VariantKey, fleet: Fleet) -> None:
        """Tell the machine when it is up, and when it is given up. Restarts in between are the fleet's."""
        started_at = asyncio.get_running_loop().time()
        await fleet.start()
        await fleet.wait_until(lambda: bool(takers(fleet, key.mode)) or given_up(fleet, key.mode))
        if takers(fleet, key.mode):
            seconds = asyncio.get_running_loop().time() - started_at
            mebibytes = kv_pool_bytes(fleet) / 2**20
            logger.info("engine variant %s: ready after %.1f s; KV pool %.1f MiB", key, seconds, mebibytes)
            self._handle(CameUp(key))
        await fleet.wait_until(lambda: given_up(fleet, key.mode))
        if self._closing:
            return
        reason = why_not(fleet, key.mode)
        logger.warning("engine variant %s: given up: %s", key, reason)
        self._handle(Broke(key, reason))

    def _stop(self, key: VariantKey, reason: str) -> None:
        logger.info("engine variant %s: stopping: %s", key, reason)
        task = asyncio.get_running_loop().create_task(self._end(key, reason), name=f"end of variant {key}")
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def _end(self, key: VariantKey, reason: str) -> None:
        watcher = self._watchers.pop(key)
        watcher.cancel()
        await asyncio.wait([watcher])
        await self._fleets[key].stop(self._stop_seconds, reason)
        del self._fleets[key]
        logger.info("engine variant %s: stopped", key)
        self._handle(Stopped(key))


def error_of(refusal: Refuse, key: VariantKey) -> GatewayError:
    kind = Overloaded if refusal.busy else ModeUnavailable
    return kind(
        f"Mode {key.mode.value!r} with KV dtype {key.kv_cache_dtype!r} can't be served now: {refusal.reason}.",
        retry_after_seconds=refusal.retry_after_seconds,
    )


def instances_of(fleet: Fleet) -> tuple[VariantInstance, ...]:
    return tuple(
        VariantInstance(
            name=report.name,
            state=report.state.value,
            reason=report.reason,
            pid=report.pid,
            num_restarts=report.num_restarts,
        )
        for report in fleet.reports()
    )


def kv_pool_bytes(fleet: Fleet) -> int:
    """What the KV pools of the ready instances take once they are full."""
    infos = [report.info for report in fleet.reports() if report.info is not None]
    return sum(info.num_blocks * info.block_size * info.kv_bytes_per_token for info in infos)
