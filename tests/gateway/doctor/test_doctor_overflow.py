"""The doctor knows that a prompt was too long from whichever API said so."""

from __future__ import annotations

import pytest

from gateway.core.errors import ContextLengthExceeded
from gateway.dialects import anthropic_messages, gemini, openai_chat, openai_completions, openai_responses
from gateway.dialects.base import Dialect, ErrorFacts
from gateway.doctor.answer import Answer
from gateway.doctor.stream_checks import is_overflow

DIALECTS = [
    module.DIALECT for module in (anthropic_messages, gemini, openai_chat, openai_completions, openai_responses)
]
SAID = "This model's maximum context length is 100 tokens, but your prompt has 200 tokens. Shorten it."


def refused(dialect: Dialect, message: str, code: str | None) -> Answer:
    facts = ErrorFacts(status=400, kind="invalid_request_error", message=message, code=code)
    return Answer(status=400, body=dialect.error_body(facts))


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_a_prompt_that_is_too_long_is_known_in_every_apis_words(dialect: Dialect):
    assert is_overflow(refused(dialect, SAID, ContextLengthExceeded.code))
    assert is_overflow(refused(dialect, SAID, None))
    assert not is_overflow(refused(dialect, "Model 'x' is not served here.", "model_not_found"))
