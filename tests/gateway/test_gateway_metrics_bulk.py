"""A histogram that takes many values at once says the same as the library's own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from gateway.metrics_bulk import BulkHistogram

BUCKETS = (0.001, 0.5, 1, 2.5, 100)
VALUES = st.lists(st.one_of(st.sampled_from((0.0, *BUCKETS)), st.floats(0, 1000)), max_size=20)
WHERES = st.tuples(st.sampled_from(("merged", "split")), st.sampled_from(("local", 'odd "name"\\')))


def text_of(registry: CollectorRegistry) -> list[str]:
    """What is told, but for when a series was made."""
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@given(st.lists(st.tuples(WHERES, VALUES), max_size=6))
def test_it_tells_what_the_librarys_histogram_tells(observed):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    bulk = BulkHistogram("gap_seconds", "Gaps.", ("mode", "backend"), buckets=BUCKETS, registry=ours)
    single = Histogram("gap_seconds", "Gaps.", ("mode", "backend"), buckets=BUCKETS, registry=theirs)
    for where, values in observed:
        bulk.observe_all(where, values)
        for value in values:
            single.labels(*where).observe(value)
        if not values:
            single.labels(*where)  # a series of nothing

    assert text_of(ours) == text_of(theirs)
