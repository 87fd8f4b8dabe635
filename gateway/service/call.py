"""What the web edge hands over: one client call, its body split into fields but not yet understood."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.core.errors import InvalidRequest
from gateway.dialects.base import Dialect
from gateway.settings.schema import KeySettings

_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_BOM = b"\xef\xbb\xbf"


class Body:
    """A JSON object whose values stay bytes until someone needs them: a long prompt is not decoded to be passed on."""

    def __init__(self, data: bytes, of_path: Mapping[str, Any] | None = None) -> None:
        """`of_path` are fields that an API has in its path; they win over the body's own."""
        self.data = data.removeprefix(_BOM)
        self.fields = _split(self.data)
        for name, value in (of_path or {}).items():
            self.fields[name] = msgspec.Raw(msgspec.json.encode(value))

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
    session: str | None = None
    arrived_at: float = field(default_factory=time.monotonic)
