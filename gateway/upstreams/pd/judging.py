"""Tells the servers' breakers how a request went at each of its two servers. Chooses nothing and sends nothing."""

from __future__ import annotations

from collections.abc import Collection

from gateway.core.errors import UpstreamError
from gateway.upstreams.pd.blame import Suspicions
from gateway.upstreams.pd.job import Hold, Job
from gateway.upstreams.pd.legs import LegFailed


class Judge:
    """One for all requests of a pair. Whatever it isn't told of a stay counts for nothing when the hold is released."""

    def __init__(self, *, is_sole: bool) -> None:
        self._suspicions = Suspicions(is_sole=is_sole)

    def failed(self, failure: LegFailed, job: Job, hold: Hold) -> None:
        """A retry goes to another server if there is one, also where it isn't known which of the two it was."""
        decoding, prefilling = hold.decoding, hold.prefilling
        hold.has_failed = True
        name = failure.server.name
        if not failure.is_shared or prefilling is None:
            for stay in hold.stays():
                if stay.name == name:
                    stay.ended(failure.error)
            job.request.failed_at.add(name)
            return
        job.request.failed_at.update((prefilling.name, decoding.name))
        blamed = self._suspicions.failed_together(prefilling.name, decoding.name)
        for stay in (prefilling, decoding):
            if stay.name in blamed:
                stay.ended(failure.error)
            else:
                stay.left()

    def better_apart(self, names: Collection[str], partners: Collection[str]) -> set[str]:
        """Servers of one side that it is better not to put together with these of the other again."""
        return self._suspicions.better_apart(names, partners)

    def worked(self, hold: Hold) -> None:
        """The answer came to its end, and with it the prefill that it was made of. Not if an error was told in it."""
        if hold.has_failed:
            return
        for stay in hold.stays():
            stay.ended()
        if hold.prefilling is not None:
            self._suspicions.worked_together(hold.prefilling.name, hold.decoding.name)

    def answered(self, status: int, name: str, job: Job, hold: Hold) -> None:
        """One of the servers has answered with an error status, which is passed on."""
        if status < 400:
            return
        error = UpstreamError(f"{name} answered {status}.", status=status)
        for stay in hold.stays():
            if stay.name == name:
                stay.ended(error)
        job.request.failed_at.add(name)
