"""Which headers of a client reach an upstream, however they are spelt and repeated."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from gateway.upstreams.http.headers import hops, to_upstream


@pytest.mark.parametrize("name", ["Connection", "connection", "CONNECTION"])
def test_ht_03_what_any_connection_header_names_stays_here(name):
    client = CIMultiDict([(name, "close"), ("OpenAI-A", "1"), ("openai-b", "2"), ("openai-c", "3")])
    client.add(name, "x, OPENAI-A ,")
    client.add(name, "openai-b")

    assert to_upstream(client) == {"openai-c": "3"}
    assert to_upstream({name: "openai-b", "openai-b": "2"}) == {}


@pytest.mark.parametrize("name", ["X-Kvgate-Hop", "x-kvgate-hop"])
def test_every_hop_counts_however_a_proxy_spells_and_splits_them(name):
    client = CIMultiDict([(name, "a, b"), ("X-Other", "z"), (name, " c ,")])

    assert hops(client) == ["a", "b", "c"]
    assert hops({name: "a,b"}) == ["a", "b"]
    assert hops({}) == []
