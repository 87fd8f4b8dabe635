"""What the pass-through reads in frames that it doesn't rebuild."""

from __future__ import annotations

import json

import pytest

from backends.protocol.messages import Usage
from gateway.core.sse_scan import Frame
from gateway.dialects.sniff import NOTHING, sniff


def seen(data, event=""):
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    return sniff(Frame(b"data: " + raw + b"\n\n", raw, event))


def delta(**fields):
    return {"choices": [{"index": 0, "delta": fields}]}


@pytest.mark.parametrize(
    "data",
    [delta(content="x"), delta(reasoning_content="x"), delta(reasoning="x"), delta(tool_calls=[{"index": 0}]),
     {"choices": [{"text": "x"}]}, {"choices": [{"message": {"content": "x"}}]}],
)  # fmt: skip
def test_mt_01_text_reasoning_and_tool_calls_are_text(data):
    assert seen(data).text


@pytest.mark.parametrize(
    "data",
    [delta(role="assistant", content=""), delta(content=None), {"choices": []}, {}, {"choices": None},
     b"not json", b"[1]", b"", b'{"choices":3}', b"null", b'{"choices":[{"delta":"x"}]}', b"[" * 5000],
)  # fmt: skip
def test_anything_else_is_nothing(data):
    assert seen(data) == NOTHING


def test_comments_are_nothing():
    assert sniff(Frame(b": x\n\n", None)) == NOTHING


def test_usage_and_finish_reason_are_read_wherever_they_are():
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    alone = seen({"choices": [], "usage": usage})
    beside = seen({"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": usage})

    assert alone.usage == beside.usage == Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
    assert alone.usage_only
    assert not beside.usage_only
    assert beside.finish_reason == "stop"


@pytest.mark.parametrize(
    ("choices", "begun", "ended"),
    [
        ([{"index": 0, "finish_reason": "stop"}], (), (0,)),
        ([{"finish_reason": "stop"}], (), (0,)),
        ([{"index": 1, "text": "x"}], (1,), ()),
        ([{"index": 0, "finish_reason": "stop"}, {"index": 2, "finish_reason": "length"}], (2,), (0, 2)),
        ([{"index": -1, "finish_reason": "stop"}], (0,), (0,)),
        ([{"index": 10**9, "text": "x"}], (0,), ()),
        ([{"index": "1", "text": "x"}], (0,), ()),
    ],
)
def test_choices_are_told_apart_as_far_as_their_numbers_make_sense(choices, begun, ended):
    found = seen({"choices": choices})
    assert (found.choices, found.ended) == (begun, ended)


@pytest.mark.parametrize(
    ("field", "cached"), [("prompt_cache_hit_tokens", 2), ("cache_read_input_tokens", 2), ("x", 0)]
)
def test_cached_tokens_have_several_names(field, cached):
    usage = {"prompt_tokens": 3, "completion_tokens": 2, field: 2}
    assert seen({"choices": [], "usage": usage}).usage.cached_tokens == cached


@pytest.mark.parametrize("usage", [{}, None, {"prompt_tokens": "3"}, {"prompt_tokens": 3}])
def test_st_15_usage_that_is_not_all_there_is_not_known(usage):
    assert seen({"choices": [], "usage": usage}).usage is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ({"code": 429}, 429),
        ({"code": "503"}, 503),
        ({"code": "rate_limit"}, None),
        ({"code": 42}, None),
        ("text", None),
    ],
)
def test_error_frames_and_their_codes(error, code):
    found = seen({"error": error})
    assert (found.error, found.error_code) == (True, code)


def test_an_event_named_error_is_an_error_whatever_it_holds():
    assert seen(b"oops", event="error").error


@pytest.mark.parametrize("data", [b"[DONE]", b" [DONE] "])
def test_done(data):
    assert seen(data).done
