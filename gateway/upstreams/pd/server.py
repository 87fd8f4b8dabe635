"""One server of a pair: what is known of it, and what whoever looks at the gateway is told of it. Asks nothing."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field

from yarl import URL

from gateway.core.errors import UpstreamTimeout, UpstreamUnreachable
from gateway.core.types import Side
from gateway.upstreams.choosing import Breaker
from gateway.upstreams.http.openai_http import OpenAIHttpUpstream
from gateway.upstreams.pd.facts import ServerFacts
from gateway.upstreams.pd.figures import PdFigures, Scraped

Unlearnt = UpstreamUnreachable | UpstreamTimeout
_VERSION = re.compile(r"/(?:v\d+(?:(?:alpha|beta)\d*)?|openai)$", re.I)


@dataclass(slots=True, eq=False)
class Server:
    """One address. `process` counts its lives: what was known of an earlier one doesn't hold."""

    name: str
    side: Side
    base_url: str
    client: OpenAIHttpUpstream
    breaker: Breaker  # opened by requests that it fails although it says that it is healthy
    is_up: bool | None = None  # None = never asked; it is tried
    process: int = 0
    facts: ServerFacts | None = field(default=None, repr=False)
    was_seen_down: bool = False  # by a look, since it was last up: what comes back is another process
    num_silent: int = 0  # looks in a row at which it took the connection and said nothing
    learning: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    num_unlearnt: int = 0  # times that it could not be asked who it is
    why_unlearnt: Unlearnt | None = None  # the last time
    double_of: str | None = None  # a server before it on its side, whose process it turned out to be

    @property
    def root(self) -> str:
        """Where the server's own pages are, besides those of the API."""
        return _VERSION.sub("", self.base_url)

    @property
    def host(self) -> str:
        return URL(self.base_url).host or ""

    @property
    def port(self) -> int:
        return URL(self.base_url).port or 80

    @property
    def instance(self) -> tuple[str, int]:
        return self.name, self.process


@dataclass(frozen=True, slots=True)
class ServerReport:
    """One server, for whoever looks at the gateway."""

    name: str
    side: str
    url: str
    state: str  # up, down or not asked yet
    breaker: str = "closed"  # open = it is left alone, half_open = the next request tries it
    failures: int = 0  # of requests, in a row
    last_failure: str | None = None
    retry_in_seconds: float | None = None
    figures: PdFigures | None = None
    figures_missing: str | None = None  # why there are none
    problem: str | None = None  # why it is not used although it is up


NOT_ASKED = Scraped(missing="not asked for here: GET /v1/engines asks")
_STATES = {True: "up", False: "down", None: "not asked yet"}


def not_asked(server: Server) -> Scraped:
    """It answers nothing else either."""
    if server.is_up is False:
        return Scraped(missing="not asked: the server is down")
    return Scraped(missing="not asked: the server gave no answer to GET /health in time")


def report(server: Server, scraped: Scraped) -> ServerReport:
    breaker = server.breaker
    return ServerReport(
        server.name,
        server.side,
        server.base_url,
        _STATES[server.is_up],
        breaker=str(breaker.state),
        failures=breaker.num_failures,
        last_failure=breaker.last_failure or None,
        retry_in_seconds=round(breaker.wait_seconds(), 1) or None,
        figures=scraped.figures,
        figures_missing=scraped.missing,
        problem=double(server) if server.double_of is not None else None,
    )


def double(server: Server) -> str:
    return f"it is the same server as {server.double_of}, and is not used; name each server once"
