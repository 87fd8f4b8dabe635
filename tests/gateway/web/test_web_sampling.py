"""Choices, logprobs, grammars and forced calls through the dialects, with a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from web_support import Answer, local_settings, running

from backends.protocol.messages import ChatPrompt, GrammarSpec, Timings, TokenLogprob, Tool, Usage
from gateway.core.errors import UpstreamGone
from gateway.core.types import ChoiceFinished, Finished, FinishReason, Started, TextDelta
from gateway.upstreams.scripted import ScriptedUpstream

USAGE = Usage(prompt_tokens=3, completion_tokens=6)
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
OTHER = {"type": "function", "function": {"name": "go"}}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def finished(reason: FinishReason = STOP, index: int = 0) -> Finished:
    return Finished(reason, USAGE, Timings(), index=index)


def token(text: str, logprob: float | None, offset: int = 0, *, top: list[TokenLogprob] | None = None) -> TokenLogprob:
    return TokenLogprob(text, text.encode(), logprob, offset, top or [])


async def ask(script: list[Any], path: str = CHAT, **body: Any) -> tuple[Answer, ScriptedUpstream]:
    engine = ScriptedUpstream([Started(3, 100), *script])
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    async with running(local_settings(), engine) as gateway:
        return await gateway.post(path, {**prompt, **body}), engine


# ----------------------------------------------------------------------------------------------------------- choices

CHOICES = [
    TextDelta("a", 1), TextDelta("b", 1, 1), TextDelta("", 1, 2), TextDelta("A", 1), ChoiceFinished(2, LENGTH),
    TextDelta("B", 1, 1), ChoiceFinished(0, STOP), TextDelta("!", 0, 1), finished(STOP, 1),
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_rv_09_each_choice_has_one_opening_and_one_end(path):
    answer, engine = await ask(CHOICES, path, n=3, stream=True, stream_options={"include_usage": True})
    choices = [choice for chunk in answer.chunks() for choice in chunk["choices"]]
    by_index = {index: [choice for choice in choices if choice["index"] == index] for index in range(3)}

    assert engine.requests[0].sampling.n == 3
    for index, (text, reason) in enumerate([("aA", "stop"), ("bB!", "stop"), ("", "length")]):
        own = by_index[index]
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == [reason]
        assert own[-1]["finish_reason"] == reason
        if path == CHAT:
            assert [choice["delta"].get("role") for choice in own].count("assistant") == 1
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(choice["delta"].get("content") or "" for choice in own) == text
        else:
            assert "".join(choice["text"] for choice in own) == text
    assert answer.chunks()[-1]["usage"]["completion_tokens"] == 6
    assert answer.done


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_rv_09_a_whole_answer_has_all_choices_in_order(path):
    answer, _ = await ask(CHOICES, path, n=3)
    choices = answer.json()["choices"]
    texts = [choice["message"]["content"] if path == CHAT else choice["text"] for choice in choices]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert texts == ["aA", "bB!", ""]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "stop", "length"]


@pytest.mark.parametrize(
    ("n", "best_of", "param"), [(0, None, "n"), (9, None, "n"), (2, 1, "best_of"), (1, 3, "best_of")]
)
async def test_rv_09_other_numbers_of_choices_are_refused(n, best_of, param):
    answer, _ = await ask([finished()], TEXT, n=n, best_of=best_of)
    assert (answer.status, answer.error["param"]) == (400, param)
    fine, engine = await ask([ChoiceFinished(0, STOP), finished(index=1)], TEXT, n=2, best_of=2, temperature=0)
    assert fine.status == 200
    assert engine.requests[0].sampling.n == 2


async def test_a_choice_that_is_given_up_never_looks_finished():
    answer, _ = await ask([TextDelta("a", 1), ChoiceFinished(1, FinishReason.ABORT)], n=2, stream=True)
    assert answer.finish_reasons() == []
    assert not answer.done
    whole, _ = await ask([TextDelta("a", 1), ChoiceFinished(1, FinishReason.ERROR)], n=2)
    assert whole.status == 502
    broken, _ = await ask([UpstreamGone("died")], n=2)
    assert broken.status == 502


# ---------------------------------------------------------------------------------------------------------- logprobs

HALF = TokenLogprob("\ufffd", b"\xe4", -0.5, 2, [TokenLogprob("\ufffd", b"\xe4", -0.5, 2), token("x", -1.5, 2)])
REST = TokenLogprob("\ufffd\ufffd", b"\xbd\xa0", -0.25, 2)
SPECIAL = TokenLogprob("<|x|>", None, -3.0, 3)
LOGPROBS = [
    TextDelta("ab", 1, 0, [token("ab", -1.0, 0, top=[token("ab", -1.0), token("c", -2.0)])]),
    TextDelta("", 1, 0, [HALF]),
    TextDelta("你", 1, 0, [REST, SPECIAL]),
    TextDelta("", 1, 0, []),
    finished(),
]


async def test_chat_logprobs_come_with_their_tokens_in_order():
    streamed, engine = await ask(LOGPROBS, logprobs=True, top_logprobs=2, stream=True)
    whole, _ = await ask(LOGPROBS, logprobs=True, top_logprobs=2)
    parts = [choice["logprobs"]["content"] for c in streamed.chunks() for choice in c["choices"] if choice["logprobs"]]
    content = whole.json()["choices"][0]["logprobs"]["content"]

    assert engine.requests[0].sampling.logprobs == 2
    assert [len(part) for part in parts] == [1, 1, 2]
    assert [item for part in parts for item in part] == content
    assert content[0] == {
        "token": "ab", "logprob": -1.0, "bytes": [97, 98],
        "top_logprobs": [
            {"token": "ab", "logprob": -1.0, "bytes": [97, 98]}, {"token": "c", "logprob": -2.0, "bytes": [99]},
        ],
    }  # fmt: skip
    assert (content[1]["token"], content[1]["bytes"]) == ("\ufffd", [0xE4])
    assert bytes(byte for item in content for byte in item["bytes"] or []).decode() == "ab你"
    assert content[3]["bytes"] is None
    assert streamed.text() == "ab你"


async def test_nobody_gets_logprobs_that_were_not_asked_for():
    answer, engine = await ask([TextDelta("a", 1), finished()])
    assert answer.json()["choices"][0]["logprobs"] is None
    assert engine.requests[0].sampling.logprobs is None
    none, engine = await ask([TextDelta("a", 1, 0, [token("a", -1.0)]), finished()], logprobs=True)
    assert none.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert engine.requests[0].sampling.logprobs == 0


async def test_completions_have_the_older_form():
    echo = TextDelta("hi", 0, 0, [token("h", None), token("i", -4.0, 1, top=[token("o", -0.1)])])
    script = [echo, *LOGPROBS]
    whole, engine = await ask(script, TEXT, logprobs=2, echo=True)
    streamed, _ = await ask(script, TEXT, logprobs=2, echo=True, stream=True)
    choice = whole.json()["choices"][0]

    sampling = engine.requests[0].sampling
    assert (sampling.logprobs, sampling.prompt_logprobs, sampling.echo) == (2, 2, True)
    assert choice["text"] == "hiab你"
    assert choice["logprobs"]["tokens"] == ["h", "i", "ab", "\ufffd", "\ufffd\ufffd", "<|x|>"]
    assert choice["logprobs"]["token_logprobs"] == [None, -4.0, -1.0, -0.5, -0.25, -3.0]
    assert choice["logprobs"]["top_logprobs"][:4] == [
        None, {"o": -0.1, "i": -4.0}, {"ab": -1.0, "c": -2.0}, {"\ufffd": -0.5, "x": -1.5},
    ]  # fmt: skip
    assert choice["logprobs"]["text_offset"] == [0, 1, 0, 2, 2, 3]
    parts = [choice["logprobs"] for c in streamed.chunks() for choice in c["choices"] if choice["logprobs"]]
    for name, values in choice["logprobs"].items():
        assert [value for part in parts for value in part[name]] == values


async def test_rv_02_no_tokens_at_all_are_allowed_with_an_echo():
    script = [
        TextDelta("hi", 0, 0, [token("hi", None)]),
        Finished(LENGTH, Usage(prompt_tokens=1, completion_tokens=0), Timings()),
    ]
    answer, engine = await ask(script, TEXT, max_tokens=0, echo=True, logprobs=1)
    assert answer.json()["choices"][0]["text"] == "hi"
    assert engine.requests[0].sampling.max_tokens == 0
    refused, _ = await ask(script, TEXT, max_tokens=0)
    assert (refused.status, refused.error["param"]) == (400, "max_tokens")
    assert "echo" in refused.error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": 2}, "logprobs"),
        (TEXT, {"logprobs": 6}, "logprobs"),
        (TEXT, {"logprobs": True}, "logprobs"),
        (TEXT, {"echo": "yes"}, "echo"),
        (CHAT, {"echo": True}, "echo"),
    ],
)
async def test_wrong_wishes_for_logprobs_are_refused_by_name(path, fields, param):
    answer, _ = await ask([finished()], path, **fields)
    assert (answer.status, answer.error["param"]) == (400, param)


# ---------------------------------------------------------------------------------------------------------- grammars

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


async def test_response_formats_reach_the_engine():
    _, engine = await ask([finished()], response_format={"type": "json_object"})
    assert engine.requests[0].sampling.grammar == GrammarSpec(kind="json_object")
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    for path in (CHAT, TEXT):
        _, engine = await ask([finished()], path, response_format=wrapped)
        spec = engine.requests[0].sampling.grammar
        assert spec.kind == "json_schema"
        assert json.loads(spec.schema) == SCHEMA
    _, engine = await ask([finished()], response_format={"type": "text"})
    assert engine.requests[0].sampling.grammar is None


@pytest.mark.parametrize(
    "value",
    [
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": "x"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"schema": []}},
        {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 70_000]}}},
        {"type": "yaml"},
        {},
        [],
    ],
)
async def test_rv_11_a_malformed_response_format_is_refused_before_the_engine(value):
    answer, engine = await ask([finished()], response_format=value)
    assert (answer.status, answer.error["param"]) == (400, "response_format")
    assert engine.requests == []


async def test_what_a_grammar_makes_void_is_said():
    answer, _ = await ask([finished()], response_format={"type": "json_object"}, stop=["x"], ignore_eos=True)
    assert "no effect on an answer that a grammar ends: stop, ignore_eos" in answer.headers["X-Kvgate-Notice"]


# -------------------------------------------------------------------------------------------------------- tool calls

NAMED = {"type": "function", "function": {"name": "look"}}
ONE = [TextDelta(piece, 1) for piece in ('{"name":"lo', 'ok","argum', 'ents":', '{"at":"}', '\\"x"', "}", "}")]
ARGUMENTS = {"at": '}"x'}


def calls_of_stream(answer: Answer) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for chunk in answer.chunks():
        for part in chunk["choices"][0]["delta"].get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(calls)
                assert (part["type"], part["function"]["arguments"]) == ("function", "")
                calls.append({"id": part["id"], "type": "function", "function": dict(part["function"])})
            else:
                assert part.keys() == {"index", "function"}
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return calls


@pytest.mark.parametrize(("reason", "expected"), [(STOP, "tool_calls"), (LENGTH, "length")])
async def test_tc_06_a_forced_call_is_the_same_streamed_or_not(reason, expected):
    fields = {"tools": [TOOL, OTHER], "tool_choice": NAMED}
    streamed, engine = await ask([*ONE, finished(reason)], stream=True, **fields)
    whole, _ = await ask([*ONE, finished(reason)], **fields)
    message = whole.json()["choices"][0]["message"]
    (call,) = calls_of_stream(streamed)

    assert streamed.finish_reasons() == [expected]
    assert whole.json()["choices"][0]["finish_reason"] == expected
    assert message["content"] is None
    (other,) = message["tool_calls"]
    assert call["function"] == other["function"]
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    assert call["id"].startswith("call_")
    assert streamed.text() == ""

    request = engine.requests[0]
    assert isinstance(request.prompt, ChatPrompt)
    assert (request.prompt.tools, request.prompt.forced_calls) == ([TOOL], 1)
    parameters = json.dumps(TOOL["function"]["parameters"], separators=(",", ":"))
    assert request.sampling.grammar == GrammarSpec(kind="tool_calls", tools=(Tool("look", parameters),))
    assert "told of the tools" in streamed.headers["X-Kvgate-Notice"]


async def test_required_allows_several_calls_unless_told_otherwise():
    text = '[{"name":"look","arguments":{}},{"name":"go","arguments":{"a":[1,{"b":"]"}]}}]'
    script = [*(TextDelta(letter, 1) for letter in text), finished()]
    streamed, engine = await ask(script, stream=True, tools=[TOOL, OTHER], tool_choice="required")
    calls = calls_of_stream(streamed)
    assert [call["function"] for call in calls] == [
        {"name": "look", "arguments": "{}"},
        {"name": "go", "arguments": '{"a":[1,{"b":"]"}]}'},
    ]
    assert len({call["id"] for call in calls}) == 2
    assert engine.requests[0].prompt.forced_calls == engine.requests[0].sampling.grammar.max_calls == 8

    _, engine = await ask([*ONE, finished()], tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    assert engine.requests[0].sampling.grammar.max_calls == 1


async def test_a_forced_call_of_several_choices_with_logprobs():
    script: list[Any] = [
        TextDelta(delta.text, 1, index, [token(delta.text, -1.0)]) for delta in ONE for index in (1, 0)
    ]
    script += [ChoiceFinished(1, STOP), finished()]
    answer, _ = await ask(script, n=2, logprobs=True, tools=[TOOL], tool_choice=NAMED)
    for choice in answer.json()["choices"]:
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
        assert len(choice["logprobs"]["content"]) == len(ONE)
        assert choice["finish_reason"] == "tool_calls"
    streamed, _ = await ask(script, n=2, logprobs=True, tools=[TOOL], tool_choice=NAMED, stream=True)
    told = [c for chunk in streamed.chunks() for c in chunk["choices"] if c["logprobs"]]
    assert len(told) == 2 * len(ONE)


async def test_a_call_that_is_cut_off_before_its_name_is_no_call():
    answer, _ = await ask([TextDelta('{"name":"l', 1), finished(LENGTH)], tools=[TOOL], tool_choice=NAMED)
    choice = answer.json()["choices"][0]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": [OTHER]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
async def test_a_choice_of_tools_that_makes_no_sense_is_refused(fields, param):
    answer, _ = await ask([finished()], **fields)
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize(
    "function",
    [
        {"name": 'a"b'},
        {"name": "x" * 129},
        {"name": "f", "parameters": []},
        {"name": "f", "parameters": {"type": "string"}},
        {"name": "f", "parameters": {"type": "object", "properties": {"x": {"enum": ["y" * 70_000]}}}},
    ],
)
async def test_a_tool_that_can_not_be_forced_is_refused(function):
    answer, _ = await ask([finished()], tools=[{"type": "function", "function": function}], tool_choice="required")
    assert answer.status == 400
    assert answer.error["param"].startswith("tools")


async def test_a_forced_call_is_stronger_than_a_response_format_and_says_so():
    answer, engine = await ask(
        [*ONE, finished()], tools=[TOOL], tool_choice=NAMED, response_format={"type": "json_object"}
    )
    assert engine.requests[0].sampling.grammar.kind == "tool_calls"
    assert "response_format has no effect" in answer.headers["X-Kvgate-Notice"]
    assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"


async def test_auto_stays_text():
    answer, engine = await ask([TextDelta("sure", 1), finished()], tools=[TOOL], tool_choice="auto")
    assert answer.json()["choices"][0]["message"]["content"] == "sure"
    assert engine.requests[0].sampling.grammar is None
    assert "come back as text" in answer.headers["X-Kvgate-Notice"]
