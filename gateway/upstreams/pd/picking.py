"""Which servers of a pair take a request: by prefix, load and room, and only a prefill that fits the decode server."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet

from gateway.core.errors import GatewayError, ModeUnavailable, TargetUnavailable, UpstreamTimeout, UpstreamUnreachable
from gateway.core.types import Side
from gateway.upstreams.choosing import Chooser
from gateway.upstreams.pd.admission import Admission, Slot
from gateway.upstreams.pd.job import Job, Stay
from gateway.upstreams.pd.legs import LegFailed
from gateway.upstreams.pd.server import Server
from gateway.upstreams.pd.servers import Servers

RETRY_SECONDS = 5.0  # told to clients while no server is up


class NoPartner(Exception):
    """No prefill server that may be asked belongs together with this decode server."""

    def __init__(self, decode: Server, error: GatewayError) -> None:
        super().__init__(error.message)
        self.decode = decode
        self.error = error


def preferred(servers: Sequence[Server], failed_at: AbstractSet[str]) -> Sequence[Server]:
    """Of those that may be asked. One that is due to be tried is, by the next request that comes.

    But not by one that has failed already: that goes to a server that it didn't fail at, and that is well.
    """
    due = [server for server in servers if server.breaker.state != "closed"]
    if not failed_at:
        return due or servers
    untried = [server for server in servers if server.name not in failed_at]
    return [server for server in untried if server not in due] or untried or servers


class Picker:
    """`admissions` are of the sides whose servers have a limit: decode and merged."""

    def __init__(
        self,
        target: str,
        servers: Servers,
        admissions: Mapping[Side, Admission],
        choosers: Mapping[Side, Chooser],
        *,
        better_apart: Callable[[Collection[str], Collection[str]], set[str]] = lambda names, partners: set(),
    ) -> None:
        self._target = target
        self._servers = servers
        self._admissions = admissions
        self._choosers = choosers
        self._better_apart = better_apart

    def serve_waiting(self) -> None:
        """Servers may have come back, or have gone."""
        for admission in self._admissions.values():
            admission.serve()

    async def place(self, job: Job, side: Side) -> tuple[Server, Slot, Stay]:
        """A place at a server of this side; waits for one.

        Raises Overloaded, ModeUnavailable if none is up, TargetUnavailable if those that are up are left alone.
        """
        chosen: list[Stay] = []
        only_url = job.only_decode if side == "decode" else None

        def choose(has_room: Callable[[str], bool]) -> str | None:
            servers = self._usable(side, only_url, job.tried)
            free = [server for server in servers if has_room(server.name)]
            if not free:
                return None
            chosen.append(self._stay(job, side, free, self._partners(job, side)))
            return chosen[-1].name

        try:
            slot = await self._admissions[side].enter(choose, is_particular=bool(only_url or job.tried))
        except BaseException:
            for stay in chosen:
                stay.done()
            raise
        return self._servers.named(slot.name), slot, chosen[-1]

    async def prefill(self, job: Job, decode: Server) -> tuple[Server, Stay]:
        """The best prefill server that belongs together with this decode server.

        Raises NoPartner if none does, ModeUnavailable or TargetUnavailable if there is none to be asked, LegFailed of
        a server that doesn't say who it is.
        """
        unfit: dict[str, ModeUnavailable] = {}
        while True:
            if unfit and not self._servers.usable("prefill", job.only_prefill, {*job.tried, *unfit}):
                ill = self._fitting(job, decode, without={*job.tried, *unfit})
                raise NoPartner(decode, self._left_alone("prefill", ill) if ill else next(iter(unfit.values())))
            server, stay = self._prefill_for(job, decode, unfit)
            try:
                await self._check(server, decode)
            except ModeUnavailable as error:
                unfit[server.name] = error
                stay.done()
            except LegFailed as failure:
                if failure.server is server:
                    stay.ended(failure.error)
                stay.done()
                raise
            except BaseException:
                stay.done()
                raise
            else:
                return server, stay

    def one(self, job: Job, side: Side, only_url: str | None = None) -> tuple[Server, Stay]:
        stay = self._stay(job, side, self._usable(side, only_url, job.tried))
        return self._servers.named(stay.name), stay

    def _partners(self, job: Job, side: Side) -> set[str]:
        """Those with which one of this side may be put together."""
        partners = self._servers.usable("prefill", job.only_prefill, job.tried) if side == "decode" else ()
        return {server.name for server in partners}

    def _fitting(self, job: Job, decode: Server, without: set[str]) -> list[Server]:
        """Prefill servers that are up and that nothing is known against with this decode server."""
        reports = self._servers.pair_reports()
        known = {one.prefill for one in reports if one.decode == decode.name and one.problem is not None}
        return self._servers.up("prefill", job.only_prefill, without | known)

    def _prefill_for(self, job: Job, decode: Server, unfit: Mapping[str, object]) -> tuple[Server, Stay]:
        servers = self._usable("prefill", job.only_prefill, {*job.tried, *unfit})
        stay = self._stay(job, "prefill", servers, {decode.name})
        return self._servers.named(stay.name), stay

    def _stay(self, job: Job, side: Side, servers: Sequence[Server], partners: AbstractSet[str] = frozenset()) -> Stay:
        suspected = self._better_apart([server.name for server in servers], partners)
        found = preferred(servers, job.request.failed_at | suspected)
        assignment = self._choosers[side].choose([server.instance for server in found], job.ask)
        visit = self._servers.named(assignment.instance[0]).breaker.admit()
        assert visit is not None, "nobody waits between a look at the breakers and this"
        return Stay(assignment, visit)

    async def _check(self, prefill: Server, decode: Server) -> None:
        for server in (prefill, decode):
            try:
                await self._servers.learn(server)
            except (UpstreamUnreachable, UpstreamTimeout) as error:
                raise LegFailed(server, error, was_asked=False) from None
        await self._servers.check_pair(prefill, decode)

    def _usable(self, side: Side, only_url: str | None, tried: set[str]) -> list[Server]:
        servers = self._servers.usable(side, only_url, tried)
        if servers:
            return servers
        if ill := self._servers.up(side, only_url, tried):
            raise self._left_alone(side, ill)
        message = f"No {side} server of target {self._target!r} is up."
        raise ModeUnavailable(message, retry_after_seconds=RETRY_SECONDS)

    def _left_alone(self, side: Side, ill: Sequence[Server]) -> TargetUnavailable:
        """Nobody else can serve: whoever asks is told at once, as of a target that is left alone."""
        first = min(ill, key=lambda server: server.breaker.wait_seconds())
        wait = max(1.0, first.breaker.wait_seconds())
        why = f" ({first.breaker.last_failure})" if first.breaker.last_failure else ""
        which = f"{ill[0].name} has" if len(ill) == 1 else f"All {side} servers that are up have"
        message = f"{which} failed several times in a row{why} at target {self._target!r}."
        return TargetUnavailable(f"{message} It is tried again in {wait:.0f} s.", retry_after_seconds=wait)
