"""Every Prometheus series of the gateway, once. Labels come from closed sets and the settings, never from a client."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from backends.protocol.messages import EngineStats, Timings, Usage
from gateway.metrics_bulk import BulkHistogram

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 5)
LAG_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2.5)
RATIO_BUCKETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
_WHERE = ("cache_mode", "backend")
_TARGET_GAUGES = {
    "in_flight": "Requests at a target.",
    "queued": "Requests that wait for a place at a target.",
    "breaker_state": "0 = closed, 1 = half open, 2 = open: the target is left alone.",
    "healthy": "1 while a target answers its health checks; absent without health_path.",
}
_ENGINE_GAUGES = {
    "running": ("num_running", "Requests running on an instance."),
    "waiting": ("num_waiting", "Requests queued on an instance."),
    "kv_blocks": ("num_blocks", "KV blocks of an instance."),
    "kv_blocks_in_use": ("num_blocks_in_use", "KV blocks held by requests."),
    "kv_blocks_cached": ("num_blocks_cached", "KV blocks kept for the prefix cache."),
    "kv_blocks_in_use_peak": ("peak_blocks_in_use", "Most KV blocks held since the last reset of peaks."),
    "memory_bytes": ("memory_bytes", "Resident (CPU) or allocated (CUDA) memory of an instance."),
    "memory_shared_bytes": (
        "shared_memory_bytes",
        "Part of memory_bytes of which other processes may hold the same pages.",
    ),
    "memory_peak_bytes": ("peak_memory_bytes", "Highest memory since the last reset of peaks."),
    "prefix_query_tokens": ("prefix_query_tokens", "Prompt tokens looked up in an instance's prefix cache."),
    "prefix_hit_tokens": ("prefix_hit_tokens", "Prompt tokens found in an instance's prefix cache."),
    "kv_transferred_bytes": ("transferred_bytes", "KV bytes that a prefill instance has sent."),
    "kv_transferred_tokens": ("transferred_tokens", "Prompt tokens whose KV came to a decode instance."),
    "kv_held_tokens": ("decode_held_tokens", "Prompt tokens whose KV a decode instance had already."),
    "stats_age_seconds": ("stale_seconds", "Age of an instance's figures: above 0 while it is in a long step."),
}


# Of a split request's prompt: hit + computed is the prompt, and held + transferred is the prompt.
_SOURCES = {
    "prefill_hit": "prefill_hit_tokens",
    "computed": "computed_tokens",
    "decode_held": "decode_held_tokens",
    "transferred": "transferred_tokens",
}
_SPLIT = "split"


_SERVER = ("backend", "server")
_SERVER_GAUGES = {
    "running": ("num_running", "Requests running on a server of a pair."),
    "waiting": ("num_waiting", "Requests queued on a server of a pair."),
    "kv_usage_ratio": ("kv_usage", "Share of a server's KV cache that is in use."),
    "prefix_query_tokens": ("prefix_query_tokens", "Prompt tokens that a server has looked up in its prefix cache."),
    "prefix_hit_tokens": ("prefix_hit_tokens", "Prompt tokens that a server has found in its prefix cache."),
    "kv_transferred_bytes": ("transferred_bytes", "KV bytes that came to a server from others."),
    "kv_failed_transfers": ("num_failed_transfers", "Transfers of KV to a server that failed."),
    "kv_expired_requests": ("num_expired", "Prefills of a server whose KV nobody has fetched in time."),
}


class ServerFigures(Protocol):
    """What a server of another engine exports; None = it doesn't."""

    @property
    def num_running(self) -> float | None: ...


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
    leg_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of a pair's two servers
    cost_usd: float | None = None


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.in_flight = Gauge(
            "kvgate_requests_in_flight", "Requests being answered at this moment.", registry=self.registry
        )
        self.loop_lag = Histogram(
            "kvgate_event_loop_lag_seconds",
            "How late a timer of the gateway's event loop runs; what comes meanwhile waits as long.",
            buckets=LAG_BUCKETS,
            registry=self.registry,
        )
        self._requests = self._counter("requests", "Requests answered.", ("dialect", *_WHERE, "outcome"))
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of answered requests.", _WHERE)
        self._cached_tokens = self._counter("cached_tokens", "Prompt tokens found in the prefix cache.", _WHERE)
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.", _WHERE)
        self._cost = self._counter("cost_usd", "What requests have cost, as far as prices are known.", _WHERE)
        self._key_refusals = self._counter("key_refusals", "Requests that a key's limits refused.", ("key", "reason"))
        self._reload_failures = self._counter("settings_reload_failures", "Settings that could not be taken over.", ())
        self._reloaded_at = Gauge(
            "kvgate_settings_loaded_timestamp_seconds",
            "When the settings in force were loaded.",
            registry=self.registry,
        )
        self._transfer_bytes = self._counter("kv_transfer_bytes", "KV bytes moved between instances.", _WHERE)
        self._split_tokens = self._counter(
            "split_prompt_tokens", "Prompt tokens of split requests by where their KV came from.", (*_WHERE, "source")
        )
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to the first token that carries text.")
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to the end of the answer.")
        self._queue = self._histogram("request_queue_seconds", "Admission to the first step.")
        self._prefill = self._histogram("request_prefill_seconds", "First step to the first token.")
        self._transfer = self._histogram("kv_transfer_seconds", "Time in which KV of a request was copied.")
        self._decode = self._histogram("request_decode_seconds", "First token to the last.")
        self._slot_wait = self._histogram("kv_slot_wait_seconds", "Split: admission to the decode side's blocks.")
        self._decode_wait = self._histogram("decode_wait_seconds", "Split: first token to the first decode step.")
        self._first_step = self._histogram(
            "first_decode_step_seconds", "Split: the first decode step of a request.", TOKEN_BUCKETS
        )
        self._itl = BulkHistogram(
            "kvgate_inter_token_latency_seconds",
            "Gap between chunks, divided by their tokens.",
            _WHERE,
            buckets=TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._overlap = self._histogram(
            "kv_transfer_overlap_ratio", "Share of the transfer hidden behind prefill.", RATIO_BUCKETS
        )
        self._retries = self._counter("upstream_retries", "Requests sent again to one target.", ("backend", "reason"))
        self._fallbacks = self._counter(
            "upstream_fallbacks", "Requests sent to another target.", ("from_backend", "to_backend", "reason")
        )
        self._targets = {
            name: Gauge(f"kvgate_upstream_{name}", text, ["backend"], registry=self.registry)
            for name, text in _TARGET_GAUGES.items()
        }
        self._engine = {
            field: Gauge(f"kvgate_engine_{name}", text, ["role"], registry=self.registry)
            for name, (field, text) in _ENGINE_GAUGES.items()
        }
        self._engine_up = Gauge("kvgate_engine_up", "1 while an instance answers.", ["role"], registry=self.registry)
        self._pair_up = Gauge(
            "kvgate_engine_pair_up",
            "1 while a prefill and a decode instance are connected.",
            ["prefill", "decode"],
            registry=self.registry,
        )

        self._leg = Histogram(
            "kvgate_leg_seconds",
            "Of a pair: prefill = the prefill server's whole answer; decode_first = the decode server's first output.",
            ["backend", "leg"],
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )
        self._leg_failures = self._counter(
            "leg_failures", "Requests that a prefill or a decode server of a pair has failed.", ("backend", "side")
        )
        self._server = {
            field: Gauge(f"kvgate_server_{name}", text, _SERVER, registry=self.registry)
            for name, (field, text) in _SERVER_GAUGES.items()
        }
        self._server_up = Gauge(
            "kvgate_server_up", "1 while a server of a pair answers GET /health.", _SERVER, registry=self.registry
        )
        self._server_breaker = Gauge(
            "kvgate_server_breaker_state",
            "Of a server of a pair: 0 = closed, 1 = half open, 2 = open: it is left alone.",
            _SERVER,
            registry=self.registry,
        )

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(f"kvgate_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = LATENCY_BUCKETS) -> Histogram:
        return Histogram(f"kvgate_{name}", text, _WHERE, buckets=buckets, registry=self.registry)

    def observe(self, figures: RequestFigures) -> None:
        """Count one finished request. Times only of requests that got an answer."""
        where = (figures.cache_mode, figures.backend)
        self._requests.labels(figures.dialect, *where, figures.outcome).inc()
        if figures.cost_usd is not None:
            self._cost.labels(*where).inc(max(0.0, figures.cost_usd))
        if figures.usage is not None:
            self._count_tokens(figures.usage, where)
        if figures.time_to_first_token_seconds is not None:
            self._ttft.labels(*where).observe(figures.time_to_first_token_seconds)
        if figures.outcome != "ok":
            return
        self._e2e.labels(*where).observe(figures.e2e_seconds)
        if figures.inter_token_seconds:
            self._itl.observe_all(where, figures.inter_token_seconds)
        for leg, seconds in figures.leg_seconds.items():
            self._leg.labels(figures.backend, leg).observe(seconds)
        if figures.timings is not None:
            self._observe_phases(figures.timings, where)

    def count_key_refusal(self, key: str, reason: str) -> None:
        self._key_refusals.labels(key, reason).inc()

    def settings_loaded(self, at: float) -> None:
        self._reloaded_at.set(at)

    def settings_refused(self) -> None:
        self._reload_failures.inc()

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
        if where[0] == _SPLIT:
            self._observe_split(timings, where)

    def _observe_split(self, timings: Timings, where: tuple[str, str]) -> None:
        for source, field in _SOURCES.items():
            self._split_tokens.labels(*where, source).inc(max(0, getattr(timings, field)))
        self._slot_wait.labels(*where).observe(timings.slot_wait_seconds)
        self._decode_wait.labels(*where).observe(timings.decode_wait_seconds)
        if timings.first_decode_step_seconds > 0:  # an answer of one token has no decode step
            self._first_step.labels(*where).observe(timings.first_decode_step_seconds)

    def set_engines(self, stats: Mapping[str, EngineStats], names: Sequence[str]) -> None:
        """The instances' own figures at this moment; an instance that doesn't answer is down.

        The label `role` has an instance's name: its role, where it is the only one of it.
        """
        for name in names:
            self._engine_up.labels(name).set(1 if name in stats else 0)
            snapshot = stats.get(name, EngineStats())
            for field, gauge in self._engine.items():
                gauge.labels(name).set(getattr(snapshot, field))

    def count_retry(self, from_backend: str, to_backend: str, reason: str) -> None:
        """One more attempt of a request, at the same target or at another one."""
        if from_backend == to_backend:
            self._retries.labels(to_backend, reason).inc()
        else:
            self._fallbacks.labels(from_backend, to_backend, reason).inc()

    def set_targets(self, figures: Mapping[str, Mapping[str, float]]) -> None:
        """Of each target at this moment, by the names of `_TARGET_GAUGES`. Those that were taken out leave no trace."""
        for gauge in self._targets.values():
            gauge.clear()
        for target, values in figures.items():
            for name, value in values.items():
                self._targets[name].labels(target).set(value)

    def set_pairs(self, connected: Mapping[tuple[str, str], bool]) -> None:
        """Of each prefill with each decode instance."""
        for (prefill, decode), is_connected in connected.items():
            self._pair_up.labels(prefill, decode).set(1 if is_connected else 0)

    def leg_failed(self, backend: str, side: str) -> None:
        """A prefill or a decode server of a pair has failed a request."""
        self._leg_failures.labels(backend, side).inc()

    def forget_servers(self) -> None:
        """Before `set_servers` of the pairs that there are at this moment."""
        for gauge in (self._server_up, self._server_breaker, *self._server.values()):
            gauge.clear()

    def set_servers(
        self, backend: str, states: Mapping[str, bool], figures: Mapping[str, ServerFigures | None]
    ) -> None:
        """Of a pair's servers, by their names of the settings. One that tells nothing has no figures."""
        for name, is_up in states.items():
            self._server_up.labels(backend, name).set(1 if is_up else 0)
            for figure, gauge in self._server.items():
                value = getattr(figures.get(name), figure, None)
                if value is not None:
                    gauge.labels(backend, name).set(value)
                else:
                    with suppress(KeyError):  # an old figure would look like one of now
                        gauge.remove(backend, name)

    def set_server_breakers(self, backend: str, levels: Mapping[str, int]) -> None:
        for name, level in levels.items():
            self._server_breaker.labels(backend, name).set(level)

    def render(self) -> bytes:
        return generate_latest(self.registry)
