"""Who may come in: the Host a request names, the page it was sent from, the key it carries. Pure; raises."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Container, Sequence
from urllib.parse import urlsplit

from gateway.core.errors import Forbidden, InvalidRequest, Unauthorized
from gateway.settings.base_url import is_loopback
from gateway.settings.schema import KeySettings, ServerSettings

_ANY_ADDRESS = ("0.0.0.0", "::", "")


def split_host(host: str) -> str:
    """The name in a Host header, without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def check_host(host: str | None, server: ServerSettings) -> None:
    """A page on the web can point its own name at this machine; its requests then carry that name."""
    if not host:
        return  # HTTP/1.0; no browser sends that
    name = split_host(host)
    allowed = [allowed.lower() for allowed in server.allowed_hosts]
    if is_loopback(name) or name == server.host.lower() or name in allowed or host.lower() in allowed or "*" in allowed:
        return
    if server.host in _ANY_ADDRESS and _is_address(name):
        return  # an address can't be pointed elsewhere
    raise Forbidden(f"Host {name[:100]!r} is not served here. Add it to server.allowed_hosts if it should be.")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def check_origin(origin: str | None, host: str | None) -> None:
    """A browser says which page sent a request. Only pages of this very host may."""
    if origin is None:
        return
    if not host or urlsplit(origin).netloc.lower() != host.strip().lower():
        raise Forbidden("Requests from web pages of another origin are not served.")


def check_said_once(name: str, values: Sequence[str]) -> None:
    """Which of two different values would count is a guess, of ours or of a proxy in front."""
    if len({value.strip().lower() for value in values}) > 1:
        raise InvalidRequest(f"{name} is given {len(values)} times with different values. Send it once.", param=name)


def check_no_key_in_url(query: Container[str]) -> None:
    """Of an API whose clients may put it there. It would be read in logs, histories and proxies."""
    if "key" in query:
        raise Unauthorized("A key in a URL is not taken: it ends up in logs. Send it in the header x-goog-api-key.")


def check_key(authorization: Sequence[str], api_key: Sequence[str], keys: Sequence[KeySettings]) -> KeySettings | None:
    """The key that a request carries, in either header. Without configured keys everyone may come in."""
    if not keys:
        return None
    given = {token for token in (_bearer(value) for value in authorization) if token}
    given |= {value.strip() for value in api_key if value.strip()}
    if not given:
        raise Unauthorized("An API key is needed: send `Authorization: Bearer KEY` or `x-api-key: KEY`.")
    if len(given) > 1:
        raise Unauthorized("The request carries two different keys. Send one.")
    return _match(given.pop(), keys)


def _bearer(value: str) -> str:
    scheme, _, token = value.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _match(given: str, keys: Sequence[KeySettings]) -> KeySettings:
    """Compares with every key, so that the time taken says nothing about any of them."""
    found: KeySettings | None = None
    sent = given.encode("utf-8", "surrogateescape")  # a header may hold any bytes
    for key in keys:
        if hmac.compare_digest(sent, key.key.get_secret_value().strip().encode()):
            found = key
    if found is None:
        raise Unauthorized("The API key is not one of this gateway's keys.")
    return found
