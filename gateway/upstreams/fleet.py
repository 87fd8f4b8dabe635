"""All instances of the bundled engine: starts and stops them together, and connects prefill with decode.

Each is watched and restarted by itself; this knows only which are ready.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

from backends.protocol.messages import PeerState, Role
from gateway.upstreams.engine_config import InstancePlan
from gateway.upstreams.engine_connection import EngineConnection
from gateway.upstreams.engine_process import COMMAND
from gateway.upstreams.instance import EngineInstance
from gateway.upstreams.pairing import Pairing
from gateway.upstreams.supervisor import SHUTTING_DOWN, InstanceReport, InstanceState, Policy

logger = logging.getLogger(__name__)


class Fleet:
    """Make it, `start` it, and `stop` it in any case: `stop` returns when no process is left."""

    def __init__(self, plans: Sequence[InstancePlan], *, policy: Policy, command: Sequence[str] = COMMAND) -> None:
        self._instances = {
            plan.role: EngineInstance(
                plan.role,
                plan.config,
                name=plan.name,
                policy=policy,
                command=command,
                changed=self._changed,
                peer_state=self._peer_state,
            )
            for plan in plans
        }
        self._pairing = Pairing()
        self._pair_timer: asyncio.TimerHandle | None = None
        self._waiters: set[asyncio.Future[None]] = set()

    async def start(self) -> None:
        """Start every process; returns before they are ready."""
        for instance in self._instances.values():
            instance.start()

    def stop_soon(self, reason: str = SHUTTING_DOWN) -> None:
        """`stop` will follow; an instance that ends before is not started again."""
        for instance in self._instances.values():
            instance.stop_soon(reason)

    async def stop(self, seconds: float, reason: str = SHUTTING_DOWN) -> None:
        """Finish what runs within `seconds`. The prefill side ends last: the decode side may still need it."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        self.stop_soon(reason)
        takers = [instance for role, instance in self._instances.items() if role != "prefill"]
        await asyncio.gather(*(instance.stop(seconds, reason) for instance in takers))
        if "prefill" in self._instances:
            await self._instances["prefill"].stop(max(0.0, end - loop.time()), reason)
        if self._pair_timer is not None:
            self._pair_timer.cancel()

    @property
    def roles(self) -> Sequence[Role]:
        return tuple(self._instances)

    def connection(self, role: Role) -> EngineConnection | None:
        """The way to a ready instance. A decode side is ready once its prefill side is connected."""
        instance = self._instances.get(role)
        if instance is None or (role == "decode" and not self._pairing.connected):
            return None
        return instance.connection

    def connections(self) -> dict[Role, EngineConnection]:
        """Every instance that answers questions, paired or not."""
        found = {role: instance.connection for role, instance in self._instances.items()}
        return {role: connection for role, connection in found.items() if connection is not None}

    def reports(self) -> list[InstanceReport]:
        return [self._report(instance) for instance in self._instances.values()]

    def report(self, role: Role) -> InstanceReport:
        return self._report(self._instances[role])

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; it is asked again after each change of any instance."""
        while not condition():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    def _report(self, instance: EngineInstance) -> InstanceReport:
        """As the instance says; but a decode side that has no prefill side yet is still starting, to everyone else."""
        report = instance.report()
        if instance.role != "decode" or report.state is not InstanceState.READY or self._pairing.connected:
            return report
        return InstanceReport(
            role=report.role,
            state=InstanceState.STARTING,
            reason=self._pairing.reason,
            pid=report.pid,
            num_restarts=report.num_restarts,
            info=report.info,
        )

    # -------------------------------------------------------------------------------------------------------- changes

    def _changed(self) -> None:
        self._pairing.sides(self._pids_of_ready_sides(), asyncio.get_running_loop().time())
        self._pair_if_due()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _peer_state(self, state: PeerState) -> None:
        if state.connected is not self._pairing.connected or state.reason != self._pairing.reason:
            logger.info("split engine: %s", "connected" if state.connected else f"not connected: {state.reason}")
        self._pairing.reported(state.connected, state.reason, asyncio.get_running_loop().time())
        self._changed()

    def _pids_of_ready_sides(self) -> tuple[int, int] | None:
        pids = []
        for role in ("decode", "prefill"):
            instance = self._instances.get(role)
            if instance is None or instance.connection is None or instance.process is None:
                return None
            pids.append(instance.process.pid)
        return pids[0], pids[1]

    def _pair_if_due(self) -> None:
        loop = asyncio.get_running_loop()
        if self._pair_timer is not None:
            self._pair_timer.cancel()
            self._pair_timer = None
        if self._pairing.due(loop.time()):
            self._connect_sides()
        elif self._pairing.deadline is not None:
            self._pair_timer = loop.call_at(self._pairing.deadline, self._pair_if_due)

    def _connect_sides(self) -> None:
        """Give each side one end of a fresh connection; they introduce themselves over it."""
        decode, prefill = self._instances["decode"].process, self._instances["prefill"].process
        if decode is None or prefill is None:
            return
        one, other = socket.socketpair()
        with one, other:
            decode.send_peer(one)
            prefill.send_peer(other)
