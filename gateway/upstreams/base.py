"""What every upstream looks like to the service. Two kinds: one speaks events, the other passes bytes through."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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
        """Started, then TextDelta*, then Finished; or a GatewayError, at any point."""


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A client's request for an upstream of the same API: the body is sent as it is."""

    path: str  # below the base URL, such as "/chat/completions"
    body: bytes
    headers: Mapping[str, str]
    stream: bool


class RawResponse(Protocol):
    """An upstream's answer whose headers have arrived."""

    status: int
    headers: Mapping[str, str]

    def chunks(self) -> AsyncIterator[bytes]:
        """Body bytes as they arrive. Raises UpstreamGone if the connection breaks before its end."""

    async def close(self) -> None:
        """Cancels the upstream's work if it is not finished."""


class PassThroughUpstream(Protocol):
    """Speaks the client's own API over HTTP."""

    name: str

    async def models(self) -> Sequence[ModelCard]: ...

    async def open(self, request: RawRequest) -> RawResponse: ...
