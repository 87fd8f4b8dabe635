"""Going on with an earlier answer by its id, and what the answer says again of its request."""

from __future__ import annotations

import json

import pytest
from generated_answers import text
from openai.types.responses import Response
from responses_support import REQUEST_ID, TOOLS, call, make_renderer, stream, whole

from gateway.core.errors import InvalidRequest
from gateway.core.types import FinishReason
from gateway.dialects.base import ErrorFacts
from gateway.dialects.openai_responses import DIALECT, to_chat
from gateway.dialects.responses_conversation import expand

HISTORY = [{"role": "user", "content": "a"}, {"type": "message", "role": "assistant", "id": "msg_1", "content": "b"}]
KEPT = {"resp_1": HISTORY}


def chat_messages(**fields):
    return to_chat(expand({"model": "m", **fields}, KEPT.get)).fields["messages"]


def refused(**fields):
    with pytest.raises(InvalidRequest) as error:
        chat_messages(**fields)
    return error.value


def test_an_earlier_answer_is_gone_on_with():
    said = chat_messages(input="c", previous_response_id="resp_1")

    assert [m["content"] for m in said] == ["a", "b", "c"]


def test_instructions_of_the_earlier_turn_do_not_carry_over():
    renderer = make_renderer(instructions="Be brief.", input="a")
    whole([text("b")], renderer=renderer)
    _, items = renderer.conversation()

    said = to_chat(expand({"input": "c", "previous_response_id": "resp_1"}, {"resp_1": items}.get)).fields["messages"]

    assert [m["role"] for m in said] == ["user", "assistant", "user"]


def test_rs_08_an_unknown_id_is_refused_with_the_vendors_code():
    error = refused(input="c", previous_response_id="resp_9")

    assert (error.param, error.code) == ("previous_response_id", "previous_response_not_found")
    assert "Previous response with id 'resp_9' not found" in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "c", "previous_response_id": 3}, "previous_response_id"),
        ({"input": 3, "previous_response_id": "resp_1"}, "input"),
        ({"input": "c", "previous_response_id": "resp_1", "conversation": "x"}, "previous_response_id"),
        ({"input": [{"role": "robot"}], "previous_response_id": "resp_1"}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "msg_9"}]}, "input[0]"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused_by_the_clients_own_path(fields, param):
    assert refused(**fields).param == param


def test_an_item_may_be_named_by_its_id():
    renderer = make_renderer(input="a", store=True)
    stream([text("b")], renderer=renderer)
    response_id, items = renderer.conversation()
    body = {"input": [{"role": "user", "content": "a"}, {"type": "item_reference", "id": f"msg_{REQUEST_ID}_0"},
                      {"role": "user", "content": "c"}]}  # fmt: skip

    said = to_chat(expand(body, {response_id: items}.get)).fields["messages"]

    assert [m["content"] for m in said] == ["a", "b", "c"]


def test_a_request_without_references_is_left_as_it_is():
    body = {"model": "m", "input": [{"role": "user", "content": "x"}]}

    assert expand(body, KEPT.get) is body


def test_what_is_remembered_is_the_whole_conversation():
    renderer = make_renderer(input=HISTORY)
    assert renderer.conversation() is None

    stream(call(0, "shell", "{}"), FinishReason.TOOL_CALLS, renderer)

    response_id, items = renderer.conversation()
    assert response_id == f"resp_{REQUEST_ID}"
    assert items[:2] == HISTORY
    assert [item["type"] for item in items[2:]] == ["function_call"]


def test_what_the_client_does_not_want_stored_is_not_remembered():
    renderer = make_renderer(store=False)
    whole([text("a")], renderer=renderer)

    assert renderer.conversation() is None


def test_the_answer_says_again_what_was_asked():
    renderer = make_renderer(
        instructions="Be brief.", max_output_tokens=5, temperature=0.5, metadata={"a": "b"}, store=False,
        tool_choice={"type": "function", "name": "shell"}, reasoning={"effort": "high"}, previous_response_id="resp_1",
        parallel_tool_calls=False, text={"format": {"type": "json_object"}}, prompt_cache_key="k", truncation="auto",
    )  # fmt: skip

    body = whole([text("a")], renderer=renderer)

    response = Response.model_validate(body)
    assert (response.instructions, response.max_output_tokens, response.temperature) == ("Be brief.", 5, 0.5)
    assert (response.metadata, response.parallel_tool_calls) == ({"a": "b"}, False)
    assert (response.previous_response_id, response.prompt_cache_key) == ("resp_1", "k")
    assert (response.truncation, body["store"]) == ("disabled", False)
    assert body["tool_choice"] == {"type": "function", "name": "shell"}
    assert body["text"] == {"format": {"type": "json_object"}}
    assert body["tools"] == TOOLS
    assert body["reasoning"] == {"effort": "high", "summary": None}


def test_tools_that_are_not_in_use_are_not_said_again():
    body = whole([text("a")], renderer=make_renderer(tools=[{"type": "web_search"}, TOOLS[0]]))

    assert [tool["type"] for tool in body["tools"]] == ["function"]


def test_cx_01_an_http_error_names_the_clients_field():
    message = "This model's maximum context length is 10 tokens."
    facts = ErrorFacts(400, "invalid_request_error", message, "messages", "context_length_exceeded")

    assert json.loads(DIALECT.error_body(facts)) == {
        "error": {
            "message": message,
            "type": "invalid_request_error",
            "param": "input",
            "code": "context_length_exceeded",
        }
    }
    assert DIALECT.error_status(facts) == 400
