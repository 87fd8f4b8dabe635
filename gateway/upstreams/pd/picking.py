"""Which servers of a pair take a request: by prefix, load and room, and only a prefill that fits the decode server."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.core.errors import ModeUnavailable, UpstreamTimeout, UpstreamUnreachable
from gateway.upstreams.choosing import Assignment, Chooser
from gateway.upstreams.pd.admission import Admission, Slot
from gateway.upstreams.pd.job import Job
from gateway.upstreams.pd.legs import LegFailed
from gateway.upstreams.pd.servers import Server, Servers, Side

RETRY_SECONDS = 5.0  # told to clients while no server is up


class NoPartner(Exception):
    """No prefill server that is up belongs together with this decode server."""

    def __init__(self, decode: Server, error: ModeUnavailable) -> None:
        super().__init__(error.message)
        self.decode = decode
        self.error = error


class Picker:
    """`admissions` are of the sides whose servers have a limit: decode and merged."""

    def __init__(
        self, target: str, servers: Servers, admissions: Mapping[Side, Admission], choosers: Mapping[Side, Chooser]
    ) -> None:
        self._target = target
        self._servers = servers
        self._admissions = admissions
        self._choosers = choosers

    def serve_waiting(self) -> None:
        """Servers may have come back, or have gone."""
        for admission in self._admissions.values():
            admission.serve()

    async def place(self, job: Job, side: Side) -> tuple[Server, Slot, Assignment]:
        """A place at a server of this side; waits for one. Raises Overloaded, or ModeUnavailable if none is up."""
        chosen: list[Assignment] = []
        only_url = job.only_decode if side == "decode" else None

        def choose(has_room: Callable[[str], bool]) -> str | None:
            servers = self._usable(side, only_url, job.tried)
            free = [server.instance for server in servers if has_room(server.name)]
            if not free:
                return None
            chosen.append(self._choosers[side].choose(free, job.ask))
            return chosen[-1].instance[0]

        try:
            slot = await self._admissions[side].enter(choose, is_particular=bool(only_url or job.tried))
        except BaseException:
            for assignment in chosen:
                assignment.done()
            raise
        return self._servers.named(slot.name), slot, chosen[-1]

    async def prefill(self, job: Job, decode: Server) -> tuple[Server, Assignment]:
        """The best prefill server that belongs together with this decode server.

        Raises NoPartner if none does, ModeUnavailable if none is up, LegFailed of a server that can't be asked.
        """
        unfit: dict[str, ModeUnavailable] = {}
        while True:
            if unfit and not self._servers.usable("prefill", job.only_prefill, {*job.tried, *unfit}):
                raise NoPartner(decode, next(iter(unfit.values())))
            server, assignment = self.one(job, "prefill", job.only_prefill, without=unfit)
            try:
                await self._check(server, decode)
            except ModeUnavailable as error:
                unfit[server.name] = error
                assignment.done()
            except BaseException:
                assignment.done()
                raise
            else:
                return server, assignment

    def one(
        self, job: Job, side: Side, only_url: str | None = None, *, without: Mapping[str, object] | None = None
    ) -> tuple[Server, Assignment]:
        servers = self._usable(side, only_url, {*job.tried, *(without or {})})
        assignment = self._choosers[side].choose([server.instance for server in servers], job.ask)
        return self._servers.named(assignment.instance[0]), assignment

    async def _check(self, prefill: Server, decode: Server) -> None:
        for server in (prefill, decode):
            try:
                await self._servers.learn(server)
            except (UpstreamUnreachable, UpstreamTimeout) as error:
                raise LegFailed(server, error, was_asked=False) from None
        await self._servers.check_pair(prefill, decode)

    def _usable(self, side: Side, only_url: str | None, tried: set[str]) -> list[Server]:
        servers = self._servers.usable(side, only_url, tried)
        if not servers:
            message = f"No {side} server of target {self._target!r} is up."
            raise ModeUnavailable(message, retry_after_seconds=RETRY_SECONDS)
        return servers
