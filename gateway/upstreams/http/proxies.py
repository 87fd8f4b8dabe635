"""Which proxy of the environment stands in front of a URL, if any. Pure: the environment's values are handed in.

Loopback never has one. NO_PROXY entries are host names with or without a leading dot (subdomains included),
`host:port`, addresses, networks such as 10.0.0.0/8, and `*`. Only HTTP proxies are spoken to.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from yarl import URL

from gateway.settings.base_url import is_loopback


class ProxyNotSpoken(ValueError):
    """The environment wants a proxy of a kind that isn't spoken here."""


def proxy_for(url: URL, environment: Mapping[str, str]) -> URL | None:
    """`environment` as `urllib.request.getproxies()` gives it: `http`, `https`, `all` and `no`."""
    host = url.host or ""
    if is_loopback(host) or _is_exempt(host, url.port, environment.get("no", "")):
        return None
    written = environment.get(url.scheme) or environment.get("all")
    if not written:
        return None
    proxy = URL(written if "://" in written else f"http://{written}")
    if proxy.scheme not in ("http", "https"):
        raise ProxyNotSpoken(f"the environment wants a {proxy.scheme} proxy for it; only HTTP proxies are spoken to")
    return proxy


def _is_exempt(host: str, port: int | None, no_proxy: str) -> bool:
    name = _plain(host)
    return any(_matches(entry.strip().lower(), name, port) for entry in no_proxy.replace(" ", ",").split(","))


def _matches(entry: str, host: str, port: int | None) -> bool:
    if entry in ("", "*"):
        return entry == "*"
    if "/" in entry:
        return _in_network(entry, host)
    pattern, entry_port = _split_port(entry)
    if entry_port is not None and entry_port != port:
        return False
    pattern = _plain(pattern).removeprefix("*").lstrip(".")
    address = _address(host)
    if address is not None:
        return address == _address(pattern)
    return host == pattern or host.endswith(f".{pattern}")


def _in_network(entry: str, host: str) -> bool:
    address = _address(host)
    try:
        return address is not None and address in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False


def _split_port(entry: str) -> tuple[str, int | None]:
    """An IPv6 address needs brackets to have a port."""
    head, colon, tail = entry.rpartition(":")
    if colon and tail.isdigit() and (":" not in head or head.endswith("]")):
        return head, int(tail)
    return entry, None


def _plain(host: str) -> str:
    return host.strip("[]").rstrip(".").lower()


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
