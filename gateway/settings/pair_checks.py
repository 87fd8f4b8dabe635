"""What `[[pairs]]` mean: servers that can't be a pair, modes that nobody serves. Pure, as `checks` is."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from urllib.parse import urlsplit

from gateway.core.types import SIDES, CacheMode
from gateway.settings.base_url import is_loopback
from gateway.settings.entries import Draft
from gateway.settings.schema import PairSettings, Settings

_WITH_BOOTSTRAP = ("sglang", "vllm-mooncake")
_TOLD_AN_ADDRESS = (*_WITH_BOOTSTRAP, "llm-d")


def addresses_of(settings: Settings, side: str) -> tuple[str, ...]:
    """Every address that a request may ask for on this side."""
    return tuple(url for pair in settings.pairs for url in getattr(pair, side))


def modes_of(pair: PairSettings) -> list[CacheMode]:
    given = {CacheMode.MERGED: bool(pair.merged), CacheMode.SPLIT: bool(pair.prefill and pair.decode)}
    return [mode for mode in CacheMode if given[mode]]


def pair_refusals(settings: Settings, draft: Draft) -> Iterator[str]:
    for i, pair in enumerate(settings.pairs):
        yield from _sides(pair, i, draft)
        yield from _same_server(pair, i, draft)
        yield from _own_address(settings, pair, i, draft)
    yield from _default_mode(settings, draft)


def pair_advice(settings: Settings, draft: Draft) -> Iterator[str]:
    for i, pair in enumerate(settings.pairs):
        if pair.bootstrap_port is not None and pair.engine not in _WITH_BOOTSTRAP:
            place = draft.origin_of(("pairs", i, "bootstrap_port"))
            yield f"{place}: no effect; only {' and '.join(_WITH_BOOTSTRAP)} have a bootstrap service"
        yield from _unreached_prefill(pair, i, draft)


def _unreached_prefill(pair: PairSettings, i: int, draft: Draft) -> Iterator[str]:
    """Some decode servers are told the prefill server's address as the settings give it."""
    here = [url for url in pair.prefill if _place(url)[0] == "loopback"]
    far = [url for url in pair.decode if _place(url)[0] != "loopback"]
    if pair.engine in _TOLD_AN_ADDRESS and here and far:
        place = draft.origin_of(("pairs", i, "prefill"))
        yield (
            f"{place}: {far[0]} will be told to fetch KV from {here[0]}, which leads it to its own host; give an "
            "address of the prefill server that it can reach"
        )


def _sides(pair: PairSettings, i: int, draft: Draft) -> Iterator[str]:
    place = draft.origin_of(("pairs", i, "name"))
    if bool(pair.prefill) != bool(pair.decode):
        missing = "decode" if pair.prefill else "prefill"
        yield f"{place}: prefill and decode servers are needed together, and there is no {missing} server"
    elif not modes_of(pair):
        yield f"{place}: there are no servers; give prefill and decode, merged, or all three"


def _same_server(pair: PairSettings, i: int, draft: Draft) -> Iterator[str]:
    for side in SIDES:
        places = [_place(url) for url in getattr(pair, side)]
        if len(set(places)) < len(places):
            yield f"{draft.origin_of(('pairs', i, side))}: a server is named twice"
    both = {_place(url): url for url in pair.prefill}.keys() & {_place(url) for url in pair.decode}
    for host, port, path in sorted(both):
        yield (
            f"{draft.origin_of(('pairs', i, 'decode'))}: {host}:{port}{path} is a prefill server too: both would be "
            "one instance, and split can't work there. merged is the mode for a single instance"
        )


def _own_address(settings: Settings, pair: PairSettings, i: int, draft: Draft) -> Iterator[str]:
    for side in SIDES:
        for url in getattr(pair, side):
            host, port, _ = _place(url)
            if host == "loopback" and port == settings.server.port and port:
                yield f"{draft.origin_of(('pairs', i, side))}: is this gateway itself; it must be another server"


def _place(url: str) -> tuple[str, int, str]:
    """Where a URL leads; every name of this host is the same."""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return ("loopback" if is_this_host(host) else _plain_host(host)), port, parts.path.removesuffix("/v1")


def is_this_host(host: str) -> bool:
    """Whether a connection to this name ends at this host, whichever address that is: 0.0.0.0 does too."""
    address = _address(host)
    return is_loopback(host) or (address is not None and (address.is_unspecified or address.is_loopback))


def _plain_host(host: str) -> str:
    """One spelling of each address: IPv6 has several."""
    address = _address(host)
    return host if address is None else str(address)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _default_mode(settings: Settings, draft: Draft) -> Iterator[str]:
    """Where pairs are all that serves, requests that choose no mode need one that they have."""
    mode, only_pairs = settings.cache_layout.mode, not (settings.targets or settings.server.api_base)
    if not settings.pairs or not only_pairs or settings.effective_engine() is not None:
        return
    if not any(mode in modes_of(pair) for pair in settings.pairs):
        known = ", ".join(sorted({each for pair in settings.pairs for each in modes_of(pair)}))
        if known:
            yield (
                f"{draft.origin_of(('cache_layout', 'mode'))}: the default mode is {mode}, but [[pairs]] have servers "
                f"only for {known}: requests that choose no mode could not be served. Set it to {known}"
            )
