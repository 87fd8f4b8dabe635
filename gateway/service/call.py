"""What the web edge hands over: one client call, its body split into fields but not yet understood."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from backends.protocol.messages import Usage
from gateway.core.errors import InvalidRequest
from gateway.core.types import ChoiceAnswer, FinishReason, TextDelta, ToolCallDelta
from gateway.dialects.sampling import Defaults, ParsedBody
from gateway.settings.schema import KeySettings

_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_BOM = b"\xef\xbb\xbf"


class Renderer(Protocol):
    """Events of one answer into the bytes of a dialect: of a choice start, deltas and end; of the answer finish."""

    def start(self, index: int) -> bytes: ...

    def delta(self, delta: TextDelta | ToolCallDelta) -> bytes: ...

    def end(self, index: int, reason: FinishReason) -> bytes: ...

    def finish(self, usage: Usage) -> bytes:
        """What follows the last choice, without `[DONE]`."""

    def whole(self, choices: Sequence[ChoiceAnswer], usage: Usage) -> bytes:
        """The answer of a request that didn't ask for a stream."""


class RendererFactory(Protocol):
    def __call__(self, request_id: str, created: int, model: str, *, include_usage: bool) -> Renderer: ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """A client API: its name in metrics, its path below a base URL, its codec."""

    name: str
    path: str
    parse: Callable[[Mapping[str, Any], Defaults], ParsedBody]
    renderer: RendererFactory


class Body:
    """A JSON object whose values stay bytes until someone needs them: a long prompt is not decoded to be passed on."""

    def __init__(self, data: bytes) -> None:
        self.data = data.removeprefix(_BOM)
        self.fields = _split(self.data)

    def value(self, name: str) -> Any:
        """One decoded value; None if absent."""
        raw = self.fields.get(name)
        return None if raw is None else _decode(raw, name)

    def values(self, *, without: frozenset[str]) -> dict[str, Any]:
        return {name: _decode(raw, name) for name, raw in self.fields.items() if name not in without}


def _split(data: bytes) -> dict[str, msgspec.Raw]:
    if not data.strip():
        raise InvalidRequest("The body is empty; a JSON object is needed.")
    try:
        data.decode("utf-8")
        return _raw_fields.decode(data)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The body is not valid UTF-8 (byte {error.start}).") from None
    except msgspec.ValidationError:
        raise InvalidRequest("The body must be a JSON object.") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise InvalidRequest("The body's JSON is nested too deeply.") from None


def _decode(raw: msgspec.Raw, name: str) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"The value of {name[:64]!r} is not valid: {error}.", param=name[:64]) from None
    except RecursionError:
        raise InvalidRequest(f"The value of {name[:64]!r} is nested too deeply.", param=name[:64]) from None


@dataclass(frozen=True, slots=True)
class Call:
    """One client call. Header names in `headers` are matched without regard to case."""

    request_id: str  # the gateway's own
    dialect: Dialect
    body: Body
    headers: Mapping[str, str]
    query: Mapping[str, str] = field(default_factory=dict)
    path_mode: str | None = None
    key: KeySettings | None = None
    client_request_id: str | None = None
    arrived_at: float = field(default_factory=time.monotonic)
