"""An upstream's key never comes back, wherever the bytes are cut; everything else passes at once."""

from __future__ import annotations

import pytest

from gateway.upstreams.http.key_blotter import KeyBlotter

KEY = "sk-abcabd-123"
TEXT = f"no: {KEY}, sk-abc sk-{KEY}".encode()
BLOTTED = b"no: ***, sk-abc sk-***"


@pytest.mark.parametrize("size", [1, 2, 5, len(KEY), 100])
def test_the_key_is_replaced_however_the_bytes_are_cut(size):
    blotter = KeyBlotter(KEY)
    out = [blotter.feed(TEXT[at : at + size]) for at in range(0, len(TEXT), size)]

    assert b"".join([*out, blotter.rest()]) == BLOTTED


def test_bytes_that_cannot_begin_the_key_are_not_held_back():
    assert KeyBlotter(KEY).feed(b"data: {}\n\n") == b"data: {}\n\n"


def test_the_beginning_of_a_key_that_does_not_go_on_comes_out_at_the_end():
    blotter = KeyBlotter(KEY)

    assert blotter.feed(b"a sk-abc") == b"a "
    assert blotter.rest() == b"sk-abc"


@pytest.mark.parametrize("key", ["", "abc"])
def test_without_a_key_worth_hiding_everything_passes(key):
    assert KeyBlotter(key).feed(b"abcabc") == b"abcabc"


def test_the_key_is_replaced_in_a_header_too():
    assert KeyBlotter(KEY).text(f"id-{KEY}") == "id-***"
    assert KeyBlotter("abc").text("abcabc") == "abcabc"
