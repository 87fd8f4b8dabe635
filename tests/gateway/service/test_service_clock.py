"""Times of tokens, on a clock that the tests turn."""

from __future__ import annotations

import pytest

from gateway.metrics import Metrics, RequestFigures
from gateway.records.store import RecordStore
from gateway.service import clock as clock_module
from gateway.service.body_rewrite import rewrite
from gateway.service.call import Body
from gateway.service.clock import TokenClock, summary
from gateway.service.exchange_headers import header_value


class Turned:
    """Stands in for the time module."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def turned(monkeypatch):
    stand_in = Turned()
    monkeypatch.setattr(clock_module, "time", stand_in)
    return stand_in


def test_mt_01_the_first_token_is_the_first_with_text(turned):
    clock = TokenClock(arrived_at=100.0)
    for at, text in ((100.1, False), (100.4, True), (100.9, True)):
        turned.now = at
        clock.tokens(1, has_text=text)

    assert clock.time_to_first_token_seconds() == pytest.approx(0.4)
    assert list(clock.inter_token_seconds(None)) == pytest.approx([0.3, 0.5])


def test_mt_04_a_chunk_of_several_tokens_is_several_gaps(turned):
    clock = TokenClock(arrived_at=100.0)
    for at, count in ((100.0, 1), (101.0, 4), (101.0, 0)):
        turned.now = at
        clock.tokens(count, has_text=True)

    assert list(clock.inter_token_seconds(5)) == pytest.approx([0.25] * 4)


def test_mt_04_chunks_of_unknown_size_are_spread_over_the_tokens_of_usage(turned):
    clock = TokenClock(arrived_at=100.0)
    for at in (100.0, 101.0, 102.0):
        turned.now = at
        clock.text_chunk()

    assert list(clock.inter_token_seconds(21)) == pytest.approx([0.1, 0.1])
    assert list(clock.inter_token_seconds(None)) == []


def test_a_summary_of_gaps():
    assert summary([3.0, 1.0, 2.0]) == {"mean": 2.0, "p50": 2.0, "p95": 3.0, "max": 3.0}


def test_failed_requests_are_counted_but_not_timed():
    metrics = Metrics()
    for outcome in ("ok", "error"):
        metrics.observe(RequestFigures("openai_chat", "merged", "local", outcome, 1.5))
    sample = metrics.registry.get_sample_value

    assert sample("kvgate_e2e_request_latency_seconds_count", {"cache_mode": "merged", "backend": "local"}) == 1
    for outcome in ("ok", "error"):
        labels = {"dialect": "openai_chat", "cache_mode": "merged", "backend": "local", "outcome": outcome}
        assert sample("kvgate_requests_total", labels) == 1


def test_a_store_of_no_records_keeps_none():
    store = RecordStore(0)
    store.add(None)
    assert len(store) == 0


@pytest.mark.parametrize(
    ("body", "remove", "replace", "add", "expected"),
    [
        (b' {"a": 1 }', (), {}, {}, b' {"a": 1 }'),
        (b' {"a": 1 }', (), {}, {"b": 2}, b' {"b":2,"a": 1 }'),
        (b"{}", (), {}, {"b": 2}, b'{"b":2}'),
        (b'{"a": 1e2,"c":0.10}', ("a",), {}, {}, b'{"c":0.10}'),
        (b'{"a": 1,"c":[1, 2]}', (), {"a": "x"}, {"d": 1}, b'{"a":"x","c":[1, 2],"d":1}'),
        (b'{"a":null}', ("a",), {}, {"a": 3}, b'{"a":3}'),
        (b'{"a":1}', (), {}, {"a": 3}, b'{"a":1}'),
    ],
)
def test_only_what_must_change_changes(body, remove, replace, add, expected):
    assert rewrite(Body(body), remove=remove, replace=replace, add=add) == expected


def test_header_values_are_one_printable_line():
    assert header_value("a\r\nb é") == "a??b ?"
    assert len(header_value("x" * 5000)) == 2000
