"""What the admin pages say of `[[pairs]]`: their servers, who fits whom, and the figures that the servers export."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from gateway.upstreams.pd.figures import PdFigures
from gateway.upstreams.pd.upstream import PairUpstream
from gateway.web.keys import METRICS


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
        states = {report.name: report.state == "up" for report in pair.server_reports()}
        app[METRICS].set_servers(name, states, found[name])


async def _all_figures(pairs: Mapping[str, PairUpstream]) -> dict[str, dict[str, PdFigures | None]]:
    found = await asyncio.gather(*(pair.figures() for pair in pairs.values()))
    return dict(zip(pairs, found, strict=True))


def _state(pair: PairUpstream, figures: Mapping[str, PdFigures | None] | None = None) -> dict[str, Any]:
    return {
        "kind": "pair",
        "engine": pair.engine,
        "modes": list(pair.modes()),
        "reachable": pair.reachable,
        "servers": msgspec.to_builtins(pair.server_reports(figures)),
        "pairs": msgspec.to_builtins(pair.pair_reports()),
    }
