"""What the admin pages say of `[[pairs]]`: their servers, who fits whom, and the figures that the servers export."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from gateway.upstreams.pd_figures import PdFigures
from gateway.upstreams.pd_upstream import PairUpstream
from gateway.web.keys import METRICS, PAIRS


def pair_states(app: web.Application) -> dict[str, dict[str, Any]]:
    """By the target's name, as /ready shows it."""
    return {name: _state(pair) for name, pair in _pairs(app).items()}


async def pair_figures(app: web.Application) -> dict[str, Any]:
    """The same with what every server says of itself at this moment."""
    found = await _all_figures(app)
    return {name: _state(pair, found[name]) for name, pair in _pairs(app).items()}


async def set_pair_metrics(app: web.Application) -> None:
    """The servers' own figures among the gateway's series."""
    found = await _all_figures(app)
    for name, pair in _pairs(app).items():
        states = {report.name: report.state == "up" for report in pair.server_reports()}
        app[METRICS].set_servers(name, states, found[name])


async def _all_figures(app: web.Application) -> dict[str, dict[str, PdFigures | None]]:
    pairs = _pairs(app)
    found = await asyncio.gather(*(pair.figures() for pair in pairs.values()))
    return dict(zip(pairs, found, strict=True))


def _pairs(app: web.Application) -> Mapping[str, PairUpstream]:
    return app.get(PAIRS, {})


def _state(pair: PairUpstream, figures: Mapping[str, PdFigures | None] | None = None) -> dict[str, Any]:
    return {
        "kind": "pair",
        "engine": pair.engine,
        "modes": list(pair.modes()),
        "reachable": pair.reachable,
        "servers": msgspec.to_builtins(pair.server_reports(figures)),
        "pairs": msgspec.to_builtins(pair.pair_reports()),
    }
