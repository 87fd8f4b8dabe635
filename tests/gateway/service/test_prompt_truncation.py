"""An upstream that has cut the prompt is recognised by its own count, and an honest one never."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.service.truncation import looks_truncated

WORDS = "The quick brown fox jumps over the lazy dog. "


def body(text):
    return json.dumps({"messages": [{"role": "user", "content": text}]}).encode()


def test_cx_04_a_count_that_the_prompt_can_not_have_is_noticed():
    assert looks_truncated(body(WORDS * 2000), 2051)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (WORDS * 2000, 20_000),
        ("平台" * 10_000, 12_000),
        ("    " * 50_000 + WORDS * 100, 2_000),  # code that is mostly blanks
        (WORDS * 100, 10),  # too short to tell
    ],
)
def test_cx_04_an_honest_count_is_not(text, tokens):
    assert not looks_truncated(body(text), tokens)


def test_images_are_many_bytes_and_few_tokens():
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    assert not looks_truncated(body([part]), 300)


@given(st.text(min_size=1, max_size=50), st.integers(300, 2000))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_one_token_for_each_character_is_never_suspicious(text, times):
    assert not looks_truncated(body(text * times), len(text) * times)
