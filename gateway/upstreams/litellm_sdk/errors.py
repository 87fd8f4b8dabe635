"""What litellm raises, as the gateway's errors: status, code, Retry-After, and no key in any word. Pure.

Classes are told apart by name, so that nothing of litellm is imported here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from gateway.core.errors import (
    CUT,
    ContextLengthExceeded,
    GatewayError,
    InvalidRequest,
    UpstreamError,
    UpstreamGone,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from gateway.core.retry_after import retry_after_seconds

_SHORTEST_SECRET = 6  # a shorter one would blot out ordinary words
_LONGEST_CHAIN = 12
_LONGEST_TEXT = 1000
_RETRY_HEADERS = ("Retry-After", "Retry-After-Ms", "X-Should-Retry")
_NOISE = re.compile(r"^(?:litellm\.)?[A-Za-z]*(?:Error|Exception|Timeout)\s*[:-]\s*")
_ADVICE = re.compile(r"\s*(?:To drop these, set|Handle with `litellm|Original exception:|LiteLLM Retried).*", re.S)
_BYTES = re.compile(r"^b(['\"])(.*)\1$", re.S)
_NO_NAME = "the host name is not known"
_UNREACHABLE = {
    "gaierror": _NO_NAME,
    "ClientConnectorDNSError": _NO_NAME,
    "ConnectionRefusedError": "connection refused",
    "ConnectError": "no connection",
    "ClientConnectorError": "no connection",
}
_BROKEN = frozenset({"RemoteProtocolError", "ReadError", "ClientPayloadError", "ServerDisconnectedError"})
_TIMED_OUT = frozenset({"Timeout", "APITimeoutError", "TimeoutException", "ReadTimeout", "ConnectTimeout"})


def gateway_error(error: BaseException, target: str, secrets: Sequence[str]) -> GatewayError:
    """One error for one of litellm's, in words that hold no secret."""
    chain = list(_chain(error))
    first = _names(chain[0])
    text = blotted(_text(chain[0]), secrets)
    if "ContextWindowExceededError" in first:
        return ContextLengthExceeded(text)
    if "UnsupportedParamsError" in first:
        return InvalidRequest(f"Upstream {target!r}: {text}")
    if _TIMED_OUT & first:
        return UpstreamTimeout(f"Upstream {target!r} took too long.")
    return _by_status(chain, target, text)


def _by_status(chain: Sequence[BaseException], target: str, text: str) -> GatewayError:
    """Whatever is told apart by what the provider answered, or by how the connection ended."""
    redirect, status = _redirect(chain), _status(chain)
    if redirect is not None:
        words = f"answered {redirect}, a redirect, which is not followed: its key would go along"
        message = f"Upstream {target!r} {words}. Set base_url to the address that it leads to."
        return UpstreamError(message, status=502, is_final=True)
    kinds = {name for part in chain for name in _names(part)}
    if status is None or status >= 500:
        reason = next((words for name, words in _UNREACHABLE.items() if name in kinds), None)
        if reason is not None:
            is_for_good = reason == _NO_NAME
            return UpstreamUnreachable(f"Upstream {target!r} can't be reached: {reason}.", for_good=is_for_good)
        if _BROKEN & kinds or "Stream ended before" in text:
            return UpstreamGone(CUT)
    headers = _retry_headers(chain)
    return UpstreamError(
        f"Upstream {target!r}: {text}",
        status=status or 502,
        retry_after=headers.get("Retry-After"),
        retry_after_seconds=retry_after_seconds(headers, time.time()),
        is_final=headers.get("X-Should-Retry", "").lower() == "false",
    )


def blotted(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, "***")
    return text


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error that says most, then what it came from. A failure inside a stream is wrapped once more."""
    inner = getattr(error, "original_exception", None)
    found: BaseException | None = inner if isinstance(inner, BaseException) else error
    for _ in range(_LONGEST_CHAIN):
        if found is None:
            return
        yield found
        found = found.__cause__ or found.__context__


def _names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _text(error: BaseException) -> str:
    """What the provider said, without the names of classes that it has been through."""
    said = getattr(error, "message", None)
    text = _ADVICE.sub("", said if isinstance(said, str) else str(error)).strip()
    while (shorter := _NOISE.sub("", text)) != text:
        text = shorter
    text = _BYTES.sub(r"\2", text.strip())
    text = " ".join(text.split())
    return text[:_LONGEST_TEXT] or type(error).__name__


def _status(chain: Sequence[BaseException]) -> int | None:
    """As the provider said it: litellm tells some as 500 that were something else."""
    said = [getattr(error, "status_code", None) for error in chain]
    found: list[int] = [status for status in said if _is_status(status)]
    if not found or found[0] != 500:
        return found[0] if found else None
    return next((status for status in found if status != 500), 500)


def _redirect(chain: Sequence[BaseException]) -> int | None:
    """Its status, if the provider answered with one: litellm tells some as 500."""
    holders = [holder for error in chain for holder in (error, getattr(error, "response", None))]
    said = [getattr(holder, "status_code", None) for holder in holders]
    return next((status for status in said if isinstance(status, int) and 300 <= status <= 399), None)


def _is_status(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 400 <= value <= 599


def _retry_headers(chain: Sequence[BaseException]) -> dict[str, str]:
    """What the provider says of trying again, by the names that HTTP writes."""
    for error in chain:
        for holder in (getattr(error, "response", None), error):
            for name in ("headers", "litellm_response_headers"):
                if found := _picked(getattr(holder, name, None)):
                    return found
    return {}


def _picked(headers: Any) -> dict[str, str]:
    if not isinstance(headers, Mapping):
        return {}
    said = {str(key).lower(): str(value) for key, value in headers.items()}
    found = {name: said[name.lower()] for name in _RETRY_HEADERS if name.lower() in said}
    return {
        name: value for name, value in found.items() if value.isascii() and value.isprintable() and len(value) <= 64
    }
