"""What the admin pages say of `[[pairs]]`: their servers, who fits whom, and the figures that the servers export."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from gateway.upstreams.pd.figures import Scraped
from gateway.upstreams.pd.upstream import PairUpstream
from gateway.web.keys import METRICS

_LEVELS = {"closed": 0, "half_open": 1, "open": 2}  # as of targets


def pair_states(pairs: Mapping[str, PairUpstream]) -> dict[str, dict[str, Any]]:
    """By the target's name, as /ready shows it."""
    return {name: _state(pair) for name, pair in pairs.items()}


async def pair_figures(pairs: Mapping[str, PairUpstream]) -> dict[str, Any]:
    """The same with what every server says of itself at this moment."""
    found = await _all_figures(pairs)
    return {name: _state(pair, found[name]) for name, pair in pairs.items()}


async def set_pair_metrics(app: web.Application, pairs: Mapping[str, PairUpstream]) -> None:
    """The servers' own figures among the gateway's series; those of pairs that were taken out leave no trace."""
    found = await _all_figures(pairs)
    app[METRICS].forget_servers()
    for name, pair in pairs.items():
        reports = pair.server_reports()
        states = {report.name: report.state == "up" for report in reports}
        app[METRICS].set_servers(name, states, {server: scraped.figures for server, scraped in found[name].items()})
        app[METRICS].set_server_breakers(name, {report.name: _LEVELS[report.breaker] for report in reports})


async def _all_figures(pairs: Mapping[str, PairUpstream]) -> dict[str, dict[str, Scraped]]:
    found = await asyncio.gather(*(pair.figures() for pair in pairs.values()))
    return dict(zip(pairs, found, strict=True))


def _state(pair: PairUpstream, scraped: Mapping[str, Scraped] | None = None) -> dict[str, Any]:
    return {
        "kind": "pair",
        "engine": pair.engine,
        "modes": list(pair.modes()),
        "reachable": pair.reachable,
        "servers": msgspec.to_builtins(pair.server_reports(scraped)),
        "pairs": msgspec.to_builtins(pair.pair_reports()),
    }
