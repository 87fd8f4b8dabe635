"""Retry-After as upstreams write it: read strictly, told in whole numbers, never relayed as nonsense."""

from __future__ import annotations

import re
from email.utils import formatdate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.retry_after import MAX_SECONDS, retry_after_seconds, told_again

NOW = 1_700_000_000.0
NONSENSE = [
    "", " ", "-5", "-0.1", "+5", "soon", "inf", "-inf", "nan", "1e400", "1e3", "0x10", "5,6", "5 s", "1_0", "５",
    "9" * 19, "9" * 5000, "5\r\nX-Evil: 1", "5\x00", "Wed", "Wed, 99 Foo 2026 99:99:99 GMT", "\u0661",
    formatdate(NOW - 5, usegmt=True), formatdate(0, usegmt=True),
]  # fmt: skip


@pytest.mark.parametrize("text", NONSENSE)
@pytest.mark.parametrize("name", ["Retry-After", "Retry-After-Ms", "retry-after"])
def test_nonsense_is_neither_heeded_nor_told(name, text):
    assert retry_after_seconds({name: text}, NOW) is None
    assert told_again({name: text, "X-Other": "a"}, NOW) == {"X-Other": "a"}


@pytest.mark.parametrize(
    ("text", "seconds", "told"),
    [
        ("0", 0.0, "0"),
        ("7", 7.0, "7"),
        (" 7 ", 7.0, "7"),
        ("0.05", 0.05, "1"),
        ("7.", 7.0, "7"),
        ("86400", 86400.0, "86400"),
        ("86401", MAX_SECONDS, "86400"),
        ("9" * 18, MAX_SECONDS, "86400"),
        (formatdate(NOW + 9, usegmt=True), 9.0, "9"),
        (formatdate(NOW + 10**9, usegmt=True), MAX_SECONDS, "86400"),
    ],
)
def test_seconds_and_dates_become_whole_seconds_of_one_day_at_most(text, seconds, told):
    assert retry_after_seconds({"Retry-After": text}, NOW) == pytest.approx(seconds)
    assert told_again({"retry-after": text}, NOW) == {"Retry-After": told}


def test_milliseconds_win_and_stay_milliseconds():
    both = {"Retry-After-Ms": "1500.2", "Retry-After": "9"}

    assert retry_after_seconds(both, NOW) == pytest.approx(1.5002)
    assert told_again(both, NOW) == {"Retry-After-Ms": "1501", "Retry-After": "9"}
    assert retry_after_seconds({"Retry-After-Ms": "-1", "Retry-After": "9"}, NOW) == 9.0


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.one_of(st.text(max_size=60), st.floats().map(str), st.integers().map(str), st.datetimes().map(str)))
def test_whatever_is_written_what_is_told_is_a_short_whole_number(text):
    seconds = retry_after_seconds({"Retry-After": text}, NOW)
    told = told_again({"Retry-After": text}, NOW).get("Retry-After")

    assert (seconds is None) == (told is None)
    if told is not None:
        assert seconds is not None
        assert 0 <= seconds <= MAX_SECONDS
        assert re.fullmatch(r"[0-9]{1,5}", told)
