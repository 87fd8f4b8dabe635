"""What every upstream looks like to the service. Two kinds: one speaks events, the other passes bytes through."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from gateway.core.types import CacheMode, CacheStrategy, ChatRequest, ModelCard, StreamEvent


class EventUpstream(Protocol):
    """Answers the internal form. Closing the stream aborts the generation and frees what it held."""

    name: str

    def models(self) -> Sequence[ModelCard]: ...

    def modes(self) -> Sequence[CacheMode]:
        """Modes that can be served at this moment."""

    def variant_of(self, strategy: CacheStrategy) -> str | None:
        """The KV dtype of the engine variant that will serve this strategy; None = no variant is needed.

        Raises InvalidRequest for a KV dtype that nothing here has.
        """

    def stream(self, request: ChatRequest) -> AsyncGenerator[StreamEvent, None]:
        """Started, then TextDelta*, then Finished; or a GatewayError, at any point.

        Started comes again, of another instance, if the first one failed before any output.
        """

    async def back(self, strategy: CacheStrategy) -> None:
        """Return once this strategy can be served again, after a ModeUnavailable with `is_restarting`.

        Or never again: `stream` then says why.
        """


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A client's request for an upstream of the same API: the body is sent as it is."""

    path: str  # below the base URL, such as "/chat/completions"
    body: bytes
    headers: Mapping[str, str]
    stream: bool
    key_header: str = "Authorization"  # in which this API expects the target's key; else `x-api-key`
    strategy: CacheStrategy | None = None  # for an upstream that lays out the cache itself
    own_headers: Mapping[str, str] = field(default_factory=dict)  # of ours, never of a client: they steer the upstream
    on_resent: Callable[[], object] | None = field(default=None, compare=False, repr=False)  # called for each time more
    failed_at: set[str] = field(default_factory=set)  # its servers that this failed at


class RawResponse(Protocol):
    """An upstream's answer whose headers have arrived."""

    status: int
    headers: Mapping[str, str]

    def chunks(self) -> AsyncIterator[bytes]:
        """Body bytes as they arrive. Raises UpstreamGone if the connection breaks before its end."""

    async def close(self) -> None:
        """Cancels the upstream's work if it is not finished."""


@dataclass(slots=True)
class Served:
    """Which of an upstream's several servers answer, and where the time went. Filled in until the answer ends."""

    instance: str = ""
    instance_reason: str = ""
    notices: tuple[str, ...] = ()
    queue_seconds: float | None = None  # before any server was asked
    prefill_seconds: float | None = None  # of the prefill server's whole answer
    decode_first_seconds: float | None = None  # from asking the decode server to its first output

    def leg_seconds(self) -> dict[str, float]:
        """As far as they are known."""
        found = {"prefill": self.prefill_seconds, "decode_first": self.decode_first_seconds}
        return {leg: seconds for leg, seconds in found.items() if seconds is not None}


@runtime_checkable
class ServedResponse(Protocol):
    """An answer of an upstream that consists of several servers."""

    served: Served


class PassThroughUpstream(Protocol):
    """Speaks one or more client APIs over HTTP."""

    name: str

    @property
    def dialects(self) -> Sequence[str]:
        """The names of those APIs."""

    @property
    def knows_models(self) -> bool:
        """False while nobody there has answered what is served."""

    async def models(self) -> Sequence[ModelCard]: ...

    async def open(self, request: RawRequest) -> RawResponse: ...
