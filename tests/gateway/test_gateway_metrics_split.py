"""The series of the split engine and of single instances: labels from closed sets, each token counted once a pair."""

from __future__ import annotations

from typing import Any

from backends.protocol.messages import EngineStats, Timings
from gateway.metrics import Metrics, RequestFigures

TIMINGS = Timings(
    slot_wait_seconds=0.5,
    decode_wait_seconds=0.25,
    first_decode_step_seconds=0.125,
    prefill_hit_tokens=30,
    computed_tokens=70,
    decode_held_tokens=60,
    transferred_tokens=40,
)
WHERE = {"cache_mode": "split", "backend": "local"}


def observed(**figures: Any) -> Metrics:
    metrics = Metrics()
    base = {"dialect": "chat", "cache_mode": "split", "backend": "local", "outcome": "ok", "e2e_seconds": 1.0}
    metrics.observe(RequestFigures(**{**base, "timings": TIMINGS, **figures}))
    return metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_a_split_prompt_is_counted_by_where_its_kv_came_from():
    metrics = observed()
    counts = {
        source: value(metrics, "kvgate_split_prompt_tokens_total", **WHERE, source=source)
        for source in ("prefill_hit", "computed", "decode_held", "transferred")
    }

    assert counts == {"prefill_hit": 30, "computed": 70, "decode_held": 60, "transferred": 40}
    assert counts["prefill_hit"] + counts["computed"] == counts["decode_held"] + counts["transferred"] == 100


def test_the_waits_of_a_split_request_are_histograms():
    metrics = observed()

    for name, seconds in (
        ("kv_slot_wait_seconds", 0.5), ("decode_wait_seconds", 0.25), ("first_decode_step_seconds", 0.125)
    ):  # fmt: skip
        assert value(metrics, f"kvgate_{name}_sum", **WHERE) == seconds


def test_an_answer_without_a_decode_step_has_none_and_a_merged_one_has_no_split_figures():
    one_token = observed(timings=Timings(computed_tokens=5, transferred_tokens=5))
    merged = observed(cache_mode="merged")

    assert value(one_token, "kvgate_first_decode_step_seconds_count", **WHERE) is None
    assert "source=" not in merged.render().decode()


def test_instances_and_pairs_are_gauges_by_name():
    metrics = Metrics()
    stats = EngineStats(decode_held_tokens=7, transferred_bytes=9, memory_bytes=5, shared_memory_bytes=3)
    metrics.set_engines({"decode-1": stats}, ["decode-0", "decode-1"])
    metrics.set_pairs({("prefill", "decode-0"): False, ("prefill", "decode-1"): True})

    assert value(metrics, "kvgate_engine_up", role="decode-0") == 0
    assert value(metrics, "kvgate_engine_kv_held_tokens", role="decode-1") == 7
    assert value(metrics, "kvgate_engine_kv_transferred_bytes", role="decode-1") == 9
    assert value(metrics, "kvgate_engine_memory_shared_bytes", role="decode-1") == 3
    assert value(metrics, "kvgate_engine_pair_up", prefill="prefill", decode="decode-0") == 0
    assert value(metrics, "kvgate_engine_pair_up", prefill="prefill", decode="decode-1") == 1
