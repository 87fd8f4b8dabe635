"""All instances of the bundled engine: starts and stops them together, and says which of them take requests.

Each is watched and restarted by itself; `pairs` connects the prefill with the decode instances.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from backends.protocol.messages import PeerState, Role
from gateway.upstreams.engine.config import InstancePlan
from gateway.upstreams.engine.connection import EngineConnection
from gateway.upstreams.engine.instance import EngineInstance
from gateway.upstreams.engine.pairs import PairReport, Pairs
from gateway.upstreams.engine.process import COMMAND
from gateway.upstreams.engine.supervisor import SHUTTING_DOWN, InstanceReport, InstanceState, Policy


@dataclass(frozen=True, slots=True)
class Taker:
    """An instance that takes requests at this moment. `process` is another after a restart: its caches are empty."""

    name: str
    process: int
    connection: EngineConnection


class Fleet:
    """Make it, `start` it, and `stop` it in any case: `stop` returns when no process is left."""

    def __init__(self, plans: Sequence[InstancePlan], *, policy: Policy, command: Sequence[str] = COMMAND) -> None:
        self._instances = {
            plan.name: EngineInstance(
                plan.role,
                plan.config,
                name=plan.name,
                policy=policy,
                command=command,
                changed=self._changed,
                peer_state=partial(self._peer_state, plan.name),
            )
            for plan in plans
        }
        backends = [plan.config.get("transfer_backend", "local") for plan in plans]
        self._pairs = Pairs(
            self._of("decode"), self._of("prefill"), transfer_backend=backends[0] if backends else "local"
        )
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
        takers = [instance for instance in self._instances.values() if instance.role != "prefill"]
        await asyncio.gather(*(instance.stop(seconds, reason) for instance in takers))
        rest = max(0.0, end - loop.time())
        await asyncio.gather(*(instance.stop(rest, reason) for instance in self._of("prefill")))
        self._pairs.close()

    def takers(self, role: Role) -> list[Taker]:
        """Those of a role that serve now. A decode instance does once any prefill instance is connected to it."""
        found = []
        for instance in self._of(role):
            connection, process = instance.connection, instance.process
            is_paired = role != "decode" or self._pairs.connected(instance.name)
            if connection is not None and process is not None and is_paired:
                found.append(Taker(instance.name, process.pid, connection))
        return found

    def connections(self) -> dict[str, EngineConnection]:
        """Every instance that answers questions, paired or not, by name."""
        found = {name: instance.connection for name, instance in self._instances.items()}
        return {name: connection for name, connection in found.items() if connection is not None}

    def reports(self, role: Role | None = None) -> list[InstanceReport]:
        """Of all instances, or of those of one role."""
        return [self._report(item) for item in self._instances.values() if role is None or item.role == role]

    def pairs(self) -> list[PairReport]:
        return self._pairs.reports()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; it is asked again after each change of any instance."""
        while not condition():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    def _of(self, role: Role) -> list[EngineInstance]:
        return [instance for instance in self._instances.values() if instance.role == role]

    def _report(self, instance: EngineInstance) -> InstanceReport:
        """As the instance says; but a decode side that has no prefill side yet is still starting, to everyone else."""
        report = instance.report()
        is_alone = instance.role == "decode" and not self._pairs.connected(instance.name)
        if not is_alone or report.state is not InstanceState.READY:
            return report
        return replace(report, state=InstanceState.STARTING, reason=self._pairs.reason(instance.name))

    # -------------------------------------------------------------------------------------------------------- changes

    def _changed(self) -> None:
        self._pairs.update()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _peer_state(self, decode: str, state: PeerState) -> None:
        self._pairs.reported(decode, state)
        self._changed()
