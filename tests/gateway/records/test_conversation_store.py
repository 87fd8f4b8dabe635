"""Conversations kept for clients that go on by an id: bounded, and apart for each owner."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.records.conversations import ConversationStore

TEN = "12345678"  # ten bytes as JSON


def test_what_was_put_is_given_back_as_the_callers_own():
    store = ConversationStore(4, 1000)
    items = [{"role": "user", "content": "ä"}]
    assert store.put("key", "resp_1", items)
    items[0]["content"] = "changed"

    first = store.get("key", "resp_1")
    first[0]["content"] = "changed too"

    assert store.get("key", "resp_1") == [{"role": "user", "content": "ä"}]


def test_one_owner_never_reads_what_is_another_ones():
    store = ConversationStore(4, 1000)
    store.put("a", "resp_1", "mine")

    assert store.get("b", "resp_1") is None
    assert store.get("", "resp_1") is None
    assert store.get("a", "resp_1") == "mine"


def test_the_least_recently_used_goes_first():
    store = ConversationStore(2, 1000)
    store.put("", "1", TEN)
    store.put("", "2", TEN)
    store.get("", "1")
    store.put("", "3", TEN)

    assert [store.get("", name) for name in "123"] == [TEN, None, TEN]


def test_the_bytes_are_bounded():
    store = ConversationStore(100, 25)
    for name in "123":
        assert store.put("", name, TEN)

    assert (len(store), store.num_bytes) == (2, 20)
    assert store.get("", "1") is None


def test_one_that_is_too_big_pushes_nothing_out():
    store = ConversationStore(100, 25)
    store.put("", "1", TEN)

    assert not store.put("", "2", TEN * 3)
    assert (store.get("", "1"), store.get("", "2")) == (TEN, None)


def test_a_newer_version_takes_the_place_of_the_older():
    store = ConversationStore(4, 25)
    store.put("", "1", TEN)
    store.put("", "1", TEN)

    assert (len(store), store.num_bytes) == (1, 10)
    assert not store.put("", "1", TEN * 3)
    assert store.get("", "1") is None, "an old version is not given for a newer one"
    assert store.num_bytes == 0


def test_a_store_for_none_keeps_none():
    store = ConversationStore(0, 1000)

    assert not store.put("", "1", TEN)
    assert store.get("", "1") is None


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("123"), st.text(max_size=30)), max_size=30))
def test_limits_hold_after_any_use(puts):
    store = ConversationStore(3, 60)
    for owner, name, text in puts:
        kept = store.put(owner, name, text)
        assert store.get(owner, name) == (text if kept else None)
        assert len(store) <= 3
        assert 0 <= store.num_bytes <= 60
