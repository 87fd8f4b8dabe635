"""What an engine's messages become, and what of them is nothing."""

from __future__ import annotations

import pytest

from backends.protocol.messages import Accepted, TokenChunk
from gateway.core.types import ChoiceFinished, FinishReason, Started, TextDelta
from gateway.service.clock import TokenClock
from gateway.upstreams.engine.messages import events_of

PREFILL_STEP = TokenChunk(request_id="a", text="", token_ids=[])


def test_st_27_a_step_that_made_no_token_is_no_event():
    assert events_of(PREFILL_STEP) == []


@pytest.mark.parametrize(
    "chunk",
    [
        TokenChunk(request_id="a", text="", token_ids=[5]),  # its text is held back
        TokenChunk(request_id="a", text="x", token_ids=[]),  # text that was held back before
    ],
)
def test_a_token_or_a_text_alone_is_one(chunk):
    assert events_of(chunk) == [TextDelta(chunk.text, len(chunk.token_ids))]


def test_an_empty_end_of_a_choice_is_its_end():
    _, end = events_of(TokenChunk(request_id="a", text="", token_ids=[], index=1, finish_reason="stop"))
    assert end == ChoiceFinished(1, FinishReason.STOP, None)


def test_an_acceptance_is_the_start():
    assert events_of(Accepted(request_id="a", prompt_tokens=3, max_tokens=8)) == [Started(3, 8, ())]


def test_st_27_an_empty_output_stamps_nothing():
    clock = TokenClock(arrived_at=0.0)
    for _ in range(3):
        clock.tokens(0, has_text=False)
    assert (clock.num_chunks, clock.first_text_at) == (0, None)

    clock.tokens(1, has_text=True)
    assert clock.first_text_at is not None
    assert list(clock.inter_token_seconds(1)) == []
