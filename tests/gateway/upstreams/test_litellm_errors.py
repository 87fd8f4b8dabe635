"""litellm's errors as the gateway's, without anything of litellm: its classes are known by name."""

from __future__ import annotations

import pytest

from gateway.core import errors
from gateway.upstreams.litellm_sdk.errors import CUT, gateway_error

KEY = "sk-secret-0123456789"


def make(name, *bases, message="", status=None, headers=None, cause=None, **more):
    """An exception whose class has this name."""
    error = type(name, bases or (Exception,), {})(message)
    error.message = message
    if status is not None:
        error.status_code = status
    if headers is not None:
        error.response = type("Response", (), {"headers": headers})()
    for attribute, value in more.items():
        setattr(error, attribute, value)
    error.__cause__ = cause
    return error


def told(error):
    return gateway_error(error, "far", (KEY,))


def test_a_status_comes_through_with_its_retry_after():
    error = told(make("RateLimitError", message="litellm.RateLimitError: RateLimitError: OpenAIException - slow",
                      status=429, headers={"retry-after": "7"}))  # fmt: skip
    assert isinstance(error, errors.UpstreamError)
    assert (error.status, error.retry_after, error.retry_after_seconds) == (429, "7", 7)
    assert error.message == "Upstream 'far': slow"


def test_a_provider_that_asks_not_to_be_asked_again_is_believed():
    error = told(make("RateLimitError", message="no", status=429, headers={"X-Should-Retry": "false"}))
    assert error.is_final


@pytest.mark.parametrize("message", [f"bad key {KEY}", f"{KEY}{KEY}", f"x{KEY}x"])
def test_au_03_no_key_is_in_any_word(message):
    error = told(make("AuthenticationError", message=message, status=401))
    assert KEY not in error.message
    assert error.status == 401


def test_an_error_inside_a_stream_is_the_one_that_it_wraps():
    inner = make("RateLimitError", message="slow", status=429)
    error = told(make("MidStreamFallbackError", message="x", status=503, original_exception=inner))
    assert (error.status, error.message) == (429, "Upstream 'far': slow")


def test_a_status_that_litellm_tells_as_500_is_the_provider_s():
    cause = make("AnthropicError", message="b'{...}'", status=529)
    error = told(make("InternalServerError", message="AnthropicError - b'Overloaded'", status=500, cause=cause))
    assert (error.status, error.message) == (529, "Upstream 'far': Overloaded")


def test_the_context_s_length_has_a_code_of_its_own():
    base = type("BadRequestError", (Exception,), {})
    error = told(make("ContextWindowExceededError", base, message="litellm.BadRequestError: too long", status=400))
    assert isinstance(error, errors.ContextLengthExceeded)


def test_a_parameter_that_is_not_taken_is_the_client_s_to_mend_and_no_advice_on_code_is_given():
    error = told(make("UnsupportedParamsError", message="x does not support n. To drop these, set `litellm.drop`",
                      status=400))  # fmt: skip
    assert isinstance(error, errors.InvalidRequest)
    assert error.message == "Upstream 'far': x does not support n."


@pytest.mark.parametrize("name", ["Timeout", "APITimeoutError"])
def test_a_timeout_is_one(name):
    assert isinstance(told(make(name, message="", status=408)), errors.UpstreamTimeout)


@pytest.mark.parametrize(
    ("cause", "said", "for_good"),
    [
        (ConnectionRefusedError(), "connection refused", False),
        (make("ClientConnectorError"), "no connection", False),
        (make("gaierror", OSError), "the host name is not known", True),
    ],
)
def test_nobody_there(cause, said, for_good):
    error = told(make("InternalServerError", message="Connection error", status=500, cause=cause))
    assert isinstance(error, errors.UpstreamUnreachable)
    assert said in error.message
    assert error.for_good is for_good


def test_a_cut_is_a_cut():
    cause = make("RemoteProtocolError")
    for error in (
        make("APIConnectionError", message="x", status=500, cause=cause),
        make("APIConnectionError", message="Stream ended before a finish_reason was received", status=500),
    ):
        assert isinstance(told(error), errors.UpstreamGone)
        assert told(error).message == CUT


def test_an_error_of_nobody_s_kind_is_a_502():
    error = told(KeyError("x"))
    assert isinstance(error, errors.UpstreamError)
    assert error.status == 502


def test_a_ring_of_causes_ends():
    first, second = make("A", message="x"), make("B", message="y")
    first.__cause__, second.__cause__ = second, first
    assert told(first).status == 502


@pytest.mark.parametrize(
    "headers", [{"retry-after": "7\r\nX: 1"}, {"retry-after": "é"}, {"retry-after": "1" * 99}, None, 3]
)
def test_a_header_that_is_no_header_is_left_out(headers):
    assert told(make("RateLimitError", message="x", status=429, headers=headers)).retry_after is None
