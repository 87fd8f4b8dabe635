"""Every Prometheus series of the gateway, once. Labels come from closed sets and the settings, never from a client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from backends.protocol.messages import EngineStats, Timings, Usage

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 5)
RATIO_BUCKETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
_WHERE = ("cache_mode", "backend")
_ENGINE_GAUGES = {
    "running": ("num_running", "Requests running on an instance."),
    "waiting": ("num_waiting", "Requests queued on an instance."),
    "kv_blocks": ("num_blocks", "KV blocks of an instance."),
    "kv_blocks_in_use": ("num_blocks_in_use", "KV blocks held by requests."),
    "kv_blocks_cached": ("num_blocks_cached", "KV blocks kept for the prefix cache."),
    "kv_blocks_in_use_peak": ("peak_blocks_in_use", "Most KV blocks held since the last reset of peaks."),
    "memory_bytes": ("memory_bytes", "Resident (CPU) or allocated (CUDA) memory of an instance."),
    "memory_peak_bytes": ("peak_memory_bytes", "Highest memory since the last reset of peaks."),
    "stats_age_seconds": ("stale_seconds", "Age of an instance's figures: above 0 while it is in a long step."),
}


@dataclass(frozen=True, slots=True)
class RequestFigures:
    """What one finished request is counted by. `None` = not known."""

    dialect: str
    cache_mode: str
    backend: str
    outcome: str
    e2e_seconds: float
    time_to_first_token_seconds: float | None = None
    inter_token_seconds: Sequence[float] = ()
    usage: Usage | None = None
    timings: Timings | None = None


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.in_flight = Gauge(
            "kvgate_requests_in_flight", "Requests being answered at this moment.", registry=self.registry
        )
        self._requests = self._counter("requests", "Requests answered.", ("dialect", *_WHERE, "outcome"))
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of answered requests.", _WHERE)
        self._cached_tokens = self._counter("cached_tokens", "Prompt tokens found in the prefix cache.", _WHERE)
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.", _WHERE)
        self._transfer_bytes = self._counter("kv_transfer_bytes", "KV bytes moved between instances.", _WHERE)
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to the first token that carries text.")
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to the end of the answer.")
        self._queue = self._histogram("request_queue_seconds", "Admission to the first step.")
        self._prefill = self._histogram("request_prefill_seconds", "First step to the first token.")
        self._transfer = self._histogram("kv_transfer_seconds", "Time in which KV of a request was copied.")
        self._decode = self._histogram("request_decode_seconds", "First token to the last.")
        self._itl = self._histogram(
            "inter_token_latency_seconds", "Gap between chunks, divided by their tokens.", TOKEN_BUCKETS
        )
        self._overlap = self._histogram(
            "kv_transfer_overlap_ratio", "Share of the transfer hidden behind prefill.", RATIO_BUCKETS
        )
        self._engine = {
            field: Gauge(f"kvgate_engine_{name}", text, ["role"], registry=self.registry)
            for name, (field, text) in _ENGINE_GAUGES.items()
        }
        self._engine_up = Gauge("kvgate_engine_up", "1 while an instance answers.", ["role"], registry=self.registry)

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(f"kvgate_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = LATENCY_BUCKETS) -> Histogram:
        return Histogram(f"kvgate_{name}", text, _WHERE, buckets=buckets, registry=self.registry)

    def observe(self, figures: RequestFigures) -> None:
        """Count one finished request. Times only of requests that got an answer."""
        where = (figures.cache_mode, figures.backend)
        self._requests.labels(figures.dialect, *where, figures.outcome).inc()
        if figures.usage is not None:
            self._count_tokens(figures.usage, where)
        if figures.time_to_first_token_seconds is not None:
            self._ttft.labels(*where).observe(figures.time_to_first_token_seconds)
        if figures.outcome != "ok":
            return
        self._e2e.labels(*where).observe(figures.e2e_seconds)
        if figures.inter_token_seconds:
            observe = self._itl.labels(*where).observe
            for gap in figures.inter_token_seconds:
                observe(gap)
        if figures.timings is not None:
            self._observe_phases(figures.timings, where)

    def _count_tokens(self, usage: Usage, where: tuple[str, str]) -> None:
        self._prompt_tokens.labels(*where).inc(max(0, usage.prompt_tokens))
        self._cached_tokens.labels(*where).inc(max(0, usage.cached_tokens))
        self._generation_tokens.labels(*where).inc(max(0, usage.completion_tokens))

    def _observe_phases(self, timings: Timings, where: tuple[str, str]) -> None:
        self._queue.labels(*where).observe(timings.queue_seconds)
        self._prefill.labels(*where).observe(timings.prefill_seconds)
        self._decode.labels(*where).observe(timings.decode_seconds)
        if timings.transfer_bytes:
            self._transfer.labels(*where).observe(timings.transfer_seconds)
            self._transfer_bytes.labels(*where).inc(timings.transfer_bytes)
        if timings.transfer_seconds > 0:
            ratio = min(1.0, timings.transfer_overlapped_seconds / timings.transfer_seconds)
            self._overlap.labels(*where).observe(ratio)

    def set_engines(self, stats: Mapping[str, EngineStats], roles: Sequence[str]) -> None:
        """The instances' own figures at this moment; an instance that doesn't answer is down."""
        for role in roles:
            self._engine_up.labels(role).set(1 if role in stats else 0)
            snapshot = stats.get(role, EngineStats())
            for field, gauge in self._engine.items():
                gauge.labels(role).set(getattr(snapshot, field))

    def render(self) -> bytes:
        return generate_latest(self.registry)
