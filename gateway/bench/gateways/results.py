"""What was measured of each gateway, raw. Values alone; knows no server and computes no figure."""

from __future__ import annotations

from msgspec import Struct

from gateway.bench.gateways.sizes import Sizes


class Pair(Struct, frozen=True, kw_only=True):
    """One request sent directly and one through the gateway, next to each other. Seconds."""

    direct_first: float
    direct_whole: float
    via_first: float
    via_whole: float
    via_came_first: bool


class Round(Struct, frozen=True, kw_only=True):
    """Requests a second at once, directly and through the gateway."""

    direct: float
    via: float


class MemoryPoint(Struct, frozen=True, kw_only=True):
    """Of the whole process tree, after so many requests of the memory row."""

    num_requests: int
    rss_bytes: int
    pss_bytes: int


class Burst(Struct, frozen=True, kw_only=True):
    """Many streams begun at one moment."""

    num_streams: int
    num_errors: int
    first_error: str
    max_open: int  # answered by the upstream at once: whether they really were at once
    seconds: float  # until the last had ended


class GatewayRun(Struct, kw_only=True):
    """One gateway from its start to its end."""

    name: str
    is_own: bool
    version: str
    command: list[str] = []
    note: str = ""
    ready_seconds: float | None = None
    pairs: dict[str, list[Pair]] = {}  # by kind
    rounds: dict[str, list[Round]] = {}  # by kind
    memory: list[MemoryPoint] = []
    burst: Burst | None = None
    direct_burst: Burst | None = None
    lag_p99_seconds: float | None = None  # of its event loop during the burst, as it says itself
    num_requests: int = 0  # sent to it
    problems: dict[str, str] = {}  # measure -> what went wrong
    unsupported: dict[str, str] = {}  # measure -> why there is no way to do it
    failure: str = ""  # why the whole run has none


class GatewayResult(Struct, kw_only=True):
    """Everything of one run of `kvgate bench gateway`."""

    rows: list[str]
    sizes: Sizes
    is_quick: bool
    seed: int
    facts: dict[str, str]
    runs: list[GatewayRun] = []
    missing: dict[str, str] = {}  # peer -> how to install it

    @property
    def own_runs(self) -> list[GatewayRun]:
        return [run for run in self.runs if run.is_own]

    @property
    def peer_runs(self) -> list[GatewayRun]:
        return [run for run in self.runs if not run.is_own]

    @property
    def has_failed(self) -> bool:
        return any(run.failure or run.problems or (run.burst is not None and run.burst.num_errors) for run in self.runs)
