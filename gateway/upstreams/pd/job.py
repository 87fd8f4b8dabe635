"""One request on its way to a pair of servers: what it asks, where it may go, what it holds there. Plain state."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gateway.core.types import ChatRequest
from gateway.upstreams.base import RawRequest, Served
from gateway.upstreams.choosing import Assignment
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
class Hold:
    """What a request holds at its servers, until it is over. Letting go twice does nothing."""

    slot: Slot | None
    decoding: Assignment
    prefilling: Assignment | None = None

    def prefill_ended(self) -> None:
        if self.prefilling is not None:
            self.prefilling.done()

    def release(self) -> None:
        self.prefill_ended()
        self.decoding.done()
        if self.slot is not None:
            self.slot.release()
