"""One request on its way to a pair of servers: what it asks, where it may go, what it holds there. Plain state."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gateway.core.errors import GatewayError
from gateway.core.types import ChatRequest, InstanceId
from gateway.upstreams.base import RawRequest, Served
from gateway.upstreams.choosing import Assignment, Visit
from gateway.upstreams.pd.admission import Slot
from gateway.upstreams.pd.bodies import Fields
from gateway.upstreams.pd.choice import as_body


@dataclass(slots=True)
class Job:
    request: RawRequest
    fields: Fields
    ask: ChatRequest  # what servers are chosen by
    served: Served = field(default_factory=Served)
    is_changed: bool = False  # the fields are no longer those of the client's own bytes
    only_prefill: str | None = None  # the one address that the request asks for
    only_decode: str | None = None
    tried: set[str] = field(default_factory=set)  # names of servers that can't be used for it
    arrived_at: float = field(default_factory=time.monotonic)

    def plain_request(self, own_headers: Mapping[str, str] | None = None) -> RawRequest:
        """For a server that gets the request as it is."""
        body = as_body(self.fields) if self.is_changed else self.request.body
        return replace(self.request, body=body, own_headers=own_headers or {})


@dataclass(slots=True)
class Stay:
    """A request at one server: what it counts for there as work, and how it ends for the server's breaker."""

    assignment: Assignment
    visit: Visit
    went_well: bool = False  # the server has done its part: it ends well unless something else is told

    @property
    def instance(self) -> InstanceId:
        return self.assignment.instance

    @property
    def name(self) -> str:
        return self.assignment.instance[0]

    @property
    def reason(self) -> str:
        return self.assignment.reason

    def first_token(self) -> None:
        self.assignment.first_token()
        self.visit.answered()

    def computed(self) -> None:
        """The server has no more work with it, but what becomes of it may still be its fault."""
        self.assignment.done()

    def part_done(self) -> None:
        """What the server says of its part, before another one has made use of it."""
        self.went_well = True
        self.visit.answered()

    def was_used(self) -> None:
        """Another server goes on from what this one has done."""
        if self.went_well:
            self.visit.ended()

    def ended(self, error: GatewayError | None = None) -> None:
        self.visit.ended(error)

    def left(self) -> None:
        self.visit.left()

    def done(self) -> None:
        """In any case. Nothing more is heard of it."""
        if self.went_well:
            self.visit.ended()
        else:
            self.visit.left()
        self.assignment.done()


@dataclass(slots=True)
class Hold:
    """What a request holds at its servers, until it is over. Letting go twice does nothing."""

    slot: Slot | None
    decoding: Stay
    prefilling: Stay | None = None
    has_failed: bool = False

    def stays(self) -> tuple[Stay, ...]:
        return (self.decoding,) if self.prefilling is None else (self.prefilling, self.decoding)

    def prefill_ended(self) -> None:
        if self.prefilling is not None:
            self.prefilling.computed()

    def transferred(self) -> None:
        if self.prefilling is not None:
            self.prefilling.was_used()

    def release(self) -> None:
        """The slot last: who is given it next must know what has just been learnt of the server."""
        for stay in self.stays():
            stay.done()
        if self.slot is not None:
            self.slot.release()
