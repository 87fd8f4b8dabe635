"""Anthropic bodies as the chat form: messages, tools and fields, golden."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backends.protocol.messages import ChatPrompt
from gateway.core.errors import InvalidRequest
from gateway.dialects.anthropic_messages import parse, to_chat
from gateway.dialects.sampling import Defaults, ParsedBody

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}


def said(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def used(call_id: str = "t1", name: Any = "f", **options: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": {"b": 1, "a": 2}} | options


def result(call_id: str = "t1", **options: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id} | options


def body(*messages: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    sent = [{"role": role, "content": content} for role, content in messages or [("user", "hi")]]
    return {"model": "m", "max_tokens": 10, "messages": sent} | fields


def chat(*messages: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    return to_chat(body(*messages, **fields)).fields


def local(*messages: tuple[str, Any], **fields: Any) -> ParsedBody:
    return parse(body(*messages, **fields), Defaults())


def local_messages(*messages: tuple[str, Any], **fields: Any) -> list[dict[str, Any]]:
    prompt = local(*messages, **fields).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


def refused(*messages: tuple[str, Any], **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        local(*messages, **fields)
    return caught.value


# -------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("system", ["Be brief.", [said("Be brief.")], [said("Be brief."), said("")]])
def test_system_prompt_and_content_may_be_strings_or_blocks(system: Any) -> None:
    asked = chat(("user", [said("hi") | {"cache_control": {"type": "ephemeral"}}]), system=system)

    assert asked == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        "max_tokens": 10,
    }


def test_an_05_results_come_first_each_as_a_tool_message_and_nothing_is_dropped() -> None:
    turn = [
        said("before"),
        result("t1", content=[said("ok"), said("fine")]),
        result("t2", content="boom", is_error=True),
        result("t3"),
        said("go on"),
    ]

    assert chat(("user", "q"), ("assistant", [used("t1"), used("t2"), used("t3")]), ("user", turn))["messages"][2:] == [
        {"role": "tool", "tool_call_id": "t1", "content": "ok\n\nfine"},
        {"role": "tool", "tool_call_id": "t2", "content": "[error]\n\nboom"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "before\n\ngo on"},
    ]


def test_an_05_an_image_in_a_result_goes_to_the_upstream_behind_the_tool_message() -> None:
    asked = chat(("user", [result(content=[said("see"), IMAGE])]))

    assert asked["messages"] == [
        {"role": "tool", "tool_call_id": "t1", "content": "see\n\n[image attached below]"},
        {"role": "user", "content": [IMAGE_PART]},
    ]


@pytest.mark.parametrize(("block", "name"), [(IMAGE, "image"), (PDF, "document")])
def test_an_05_what_a_text_model_cannot_see_in_a_result_is_said_to_it_and_to_the_client(
    block: dict[str, Any], name: str
) -> None:
    parsed = local(("user", [result(content=[block])]), ("user", "hi"))

    assert isinstance(parsed.prompt, ChatPrompt)
    assert parsed.prompt.messages[0]["content"] == f"[{name} left out: this model reads text only]"
    assert f"left out of tool results, since the model reads text only: {name}" in parsed.notices


def test_an_05_blocks_that_nobody_knows_are_told_as_text_with_a_notice() -> None:
    search = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "é"}}
    form = to_chat(
        body(("user", "q"), ("assistant", [search]), ("user", [{"type": "new_thing", "x": 1, "cache_control": {}}]))
    )

    assert form.fields["messages"][1:] == [
        {
            "role": "assistant",
            "content": '[server_tool_use] {"id": "s1", "name": "web_search", "input": {"query": "é"}}',
        },
        {"role": "user", "content": '[new_thing] {"x": 1}'},
    ]
    assert form.notices == ("blocks told to the model as text: server_tool_use, new_thing",)


def test_documents_and_search_results_in_text_are_text() -> None:
    document = {"type": "document", "title": "T", "context": "C", "source": {"type": "text", "data": "D"}}
    blocks = {"type": "document", "source": {"type": "content", "content": [said("E"), said("F")]}}
    search = {"type": "search_result", "title": "G", "source": "http://g", "content": [said("H")]}

    assert (
        local_messages(("user", [document, blocks, search]))[0]["content"]
        == "T\n\nC\n\nD\n\nE\n\nF\n\nG\n\nhttp://g\n\nH"
    )


def test_images_and_pdf_are_passed_to_an_upstream() -> None:
    by_url = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}

    assert chat(("user", [said("see"), IMAGE, by_url, PDF | {"title": "a.pdf"}]))["messages"][0]["content"] == [
        said("see"),
        IMAGE_PART,
        {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBE"}},
    ]


@pytest.mark.parametrize("block", [IMAGE, PDF])
def test_a_users_image_or_pdf_is_refused_for_a_text_model_by_its_place(block: dict[str, Any]) -> None:
    error = refused(("user", "q"), ("assistant", "a"), ("user", [said("see"), block]))

    assert error.param == "messages[2].content[1]"
    assert "text-only" in error.message


def test_an_07_empty_blocks_and_messages_are_left_out_and_their_neighbours_joined() -> None:
    form = to_chat(
        body(
            ("user", "a"),
            ("assistant", ""),
            ("assistant", []),
            ("assistant", [said("")]),
            ("user", [said(""), said("b")]),
        )
    )

    assert form.fields["messages"] == [{"role": "user", "content": "a\n\nb"}]
    assert form.notices == ("messages without content are left out",)


def test_an_07_a_prefill_is_continued() -> None:
    assert chat(("user", "a"), ("assistant", "{"))["continue_final_message"] is True
    assert chat(("user", "a"), ("assistant", "{"))["add_generation_prompt"] is False
    prompt = local(("user", "a"), ("assistant", [said("{")])).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.continue_final_message
    assert prompt.messages[-1] == {"role": "assistant", "content": "{"}


@pytest.mark.parametrize("last", ["", [], [{"type": "thinking", "thinking": "x", "signature": ""}], [used()]])
def test_an_07_what_has_no_text_to_continue_is_no_prefill(last: Any) -> None:
    assert "continue_final_message" not in chat(("user", "a"), ("assistant", last))


def test_consecutive_messages_of_a_role_are_one_turn() -> None:
    asked = chat(
        ("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", [said("d"), used()]), ("user", [result()])
    )

    assert [message["role"] for message in asked["messages"]] == ["user", "assistant", "tool"]
    assert asked["messages"][0]["content"] == "a\n\nb"
    assert asked["messages"][1]["content"] == "cd"


def test_a_system_message_in_the_conversation_is_told_in_the_users_turn() -> None:
    asked = chat(("user", "a"), ("system", [said("in French")]), ("assistant", "b"), ("system", "in Dutch"), system="S")

    assert asked["messages"] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a\n\n<system-reminder>\nin French\n</system-reminder>"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "<system-reminder>\nin Dutch\n</system-reminder>"},
    ]


def test_a_system_message_between_call_and_result_does_not_part_them() -> None:
    asked = chat(("user", "a"), ("assistant", [used()]), ("system", "x"), ("user", [result(content="r")]))
    assert [message["role"] for message in asked["messages"]] == ["user", "assistant", "tool", "user"]


def test_system_messages_before_all_others_belong_to_the_system_prompt() -> None:
    asked = chat(("system", "T"), ("user", "a"), system="S")
    assert asked["messages"] == [{"role": "system", "content": "S\n\nT"}, {"role": "user", "content": "a"}]


@pytest.mark.parametrize("render", [local_messages, lambda *messages: chat(*messages)["messages"]])
def test_an_10_thinking_is_reasoning_content_and_needs_no_signature(render: Any) -> None:
    turn = [{"type": "thinking", "thinking": "why", "signature": ""}, said("so"), used()]

    assert render(("user", "q"), ("assistant", turn), ("user", [result(content="r")]))[1] == {
        "role": "assistant",
        "content": "so",
        "reasoning_content": "why",
        "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}},
        ],
    }


def test_redacted_thinking_is_left_out_with_a_notice() -> None:
    form = to_chat(
        body(("user", "q"), ("assistant", [{"type": "redacted_thinking", "data": "x"}, said("a")]), ("user", "b"))
    )

    assert form.fields["messages"][1] == {"role": "assistant", "content": "a"}
    assert form.notices == ("only Anthropic's own models can read, left out: redacted_thinking",)


@pytest.mark.parametrize(
    ("value", "arguments"),
    [
        ({}, {}),
        (None, {}),
        ("", {}),
        ("  ", {}),
        ("null", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a":1', {"_raw": '{"a":1'}),
        ("[1]", {"_raw": "[1]"}),
        ([1], {"_raw": "[1]"}),
    ],
)
def test_tc_09_any_input_in_the_history_is_an_object_for_the_model(value: Any, arguments: dict[str, Any]) -> None:
    (call,) = chat(("user", "q"), ("assistant", [used(input=value)]))["messages"][1]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == arguments


def test_tc_13_calls_and_results_that_do_not_pair_keep_their_order() -> None:
    read = local_messages(
        ("user", "q"),
        ("assistant", [used("t1"), used("t2")]),
        ("user", [result("unknown", content="x"), result("t1", content="y"), result("t1", content="z"), said("on")]),
    )

    assert [message.get("tool_call_id") for message in read[2:]] == ["unknown", "t1", "t1", None]
    assert [message["content"] for message in read[2:]] == ["x", "y", "z", "on"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": None, "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": ""}], "messages"),
        ([{"role": "system", "content": "x"}], "messages"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [used()]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [result("")]}], "messages[0].content[0].tool_use_id"),
        ([{"role": "user", "content": [result(content=7)]}], "messages[0].content[0].content"),
        ([{"role": "user", "content": [result(is_error="yes")]}], "messages[0].content[0].is_error"),
        ([{"role": "assistant", "content": [result()]}], "messages[0].content[0]"),
        ([{"role": "assistant", "content": [used(id="")]}], "messages[0].content[0].id"),
        ([{"role": "assistant", "content": [used(name=None)]}], "messages[0].content[0].name"),
        ([{"role": "system", "content": [IMAGE]}, {"role": "user", "content": "x"}], "messages[0].content[0].type"),
        ([{"role": "user", "content": "x"}, {"role": "system", "content": [IMAGE]}], "messages[1].content[0].type"),
    ],
)
def test_messages_that_are_wrong_are_refused_by_their_place(messages: Any, param: str) -> None:
    assert refused(messages=messages).param == param


@pytest.mark.parametrize("source", [None, {}, {"type": "file", "file_id": "x"}, {"type": "base64"}, {"type": "url"}])
def test_an_image_without_a_readable_source_is_refused(source: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(("user", [{"type": "image", "source": source}]))
    assert str(caught.value.param).startswith("messages[0].content[0].source")


# ----------------------------------------------------------------------------------------------------------- tools


@pytest.mark.parametrize("schema", [None, {}, {"type": "object"}, {"properties": {}}])
def test_an_13_a_schema_is_always_that_of_an_object(schema: Any) -> None:
    (tool,) = chat(tools=[{"name": "f", "input_schema": schema}])["tools"]
    assert tool == {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def test_an_13_tools_keep_their_schema_and_say_what_has_no_effect() -> None:
    schema = {"$defs": {"x": {}}, "type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"]}
    custom = {
        "type": "custom",
        "name": "f",
        "input_schema": schema,
        "strict": True,
        "cache_control": {"type": "ephemeral"},
    }

    form = to_chat(body(tools=[custom]))

    assert form.fields["tools"] == [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert form.notices == ("keys of tools without effect: strict",)


def test_an_13_a_hundred_and_thirty_tools_are_passed_in_their_order() -> None:
    tools = [TOOL | {"name": f"f{index}"} for index in range(130)]
    assert [tool["function"]["name"] for tool in chat(tools=tools)["tools"]] == [tool["name"] for tool in tools]


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "f"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        ({"type": "auto", "disable_parallel_tool_use": False}, {"tool_choice": "auto"}),
    ],
)
def test_an_13_the_choice_of_tools(choice: dict[str, Any], told: dict[str, Any]) -> None:
    asked = chat(tools=[TOOL], tool_choice=choice)
    assert {key: asked[key] for key in ("tool_choice", "parallel_tool_calls") if key in asked} == told


def test_an_13_a_forced_call_is_held_to_its_grammar_by_the_local_engine() -> None:
    grammar = local(tools=[TOOL, TOOL | {"name": "g"}], tool_choice={"type": "tool", "name": "g"}).sampling.grammar
    assert grammar is not None
    assert [tool.name for tool in grammar.tools] == ["g"]


@pytest.mark.parametrize("name", ["a.b", "mcp__" + "x" * 80, "空"])
def test_an_13_a_name_that_openai_refuses_is_changed_alike_in_tools_choice_and_history(name: str) -> None:
    form = to_chat(
        body(
            ("user", "q"),
            ("assistant", [used(name=name)]),
            ("user", [result()]),
            tools=[TOOL | {"name": name}],
            tool_choice={"type": "tool", "name": name},
        )
    )

    sent = form.fields["tools"][0]["function"]["name"]
    assert len(sent) <= 64
    assert sent.isascii()
    assert form.fields["tool_choice"]["function"]["name"] == sent
    assert form.fields["messages"][1]["tool_calls"][0]["function"]["name"] == sent
    assert form.context.tool_names == {sent: name}


def test_the_local_engine_sees_names_as_they_are() -> None:
    parsed = local(tools=[TOOL | {"name": "a.b"}])
    assert isinstance(parsed.prompt, ChatPrompt)
    assert parsed.prompt.tools is not None
    assert parsed.prompt.tools[0]["function"]["name"] == "a.b"
    assert parsed.context.tool_names == {}


def test_tools_that_anthropic_runs_are_left_out_with_a_notice() -> None:
    form = to_chat(body(tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}, {"type": "mcp_toolset"}]))

    assert [tool["function"]["name"] for tool in form.fields["tools"]] == ["f"]
    assert form.notices == ("tools that only Anthropic offers are left out: web_search, mcp_toolset",)


def test_without_tools_left_the_choice_goes_too() -> None:
    asked = chat(tools=[{"type": "web_search_20250305", "name": "web_search"}], tool_choice={"type": "auto"})
    assert not {"tools", "tool_choice"} & asked.keys()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [TOOL | {"name": 'a"b'}]}, "tools[0].name"),
        ({"tools": [TOOL | {"description": 1}]}, "tools[0].description"),
        ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tools": [TOOL | {"input_schema": {"type": None}}]}, "tools[0].input_schema.type"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
            "tool_choice.disable_parallel_tool_use",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)
def test_tools_that_are_wrong_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "web_search"}])
def test_forcing_a_tool_that_only_anthropic_offers_is_refused(choice: dict[str, Any]) -> None:
    error = refused(tools=[{"type": "web_search_20250305", "name": "web_search"}], tool_choice=choice)
    assert "only Anthropic offers" in error.message


# ---------------------------------------------------------------------------------------------------------- fields


def test_sampling_fields_have_their_chat_names() -> None:
    asked = chat(temperature=0.5, top_p=0.9, top_k=40, stop_sequences=["x", "y"], seed=3)
    assert {"max_tokens": 10, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "stop": ["x", "y"], "seed": 3}.items() <= (
        asked.items()
    )


def test_the_local_engine_gets_the_same_sampling() -> None:
    sampling = local(temperature=0, top_k=40, stop_sequences=["x"]).sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens, sampling.stop) == (0.0, 40, 10, ("x",))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": [str(index) for index in range(99)]}, "stop_sequences"),
        ({"metadata": {"user_id": 1}}, "metadata.user_id"),
        ({"metadata": "x"}, "metadata"),
        ({"thinking": "on"}, "thinking"),
        ({"system": 1}, "system"),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_format": {"type": "json_schema", "schema": 1}}, "output_format.schema"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"chat_template_kwargs": 1, "thinking": {"type": "disabled"}}, "chat_template_kwargs"),
    ],
)
def test_fields_that_are_wrong_are_refused_by_the_clients_name(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)

    assert error.param == param
    assert f"`{param}" in error.message


def test_too_large_a_schema_is_refused_by_the_clients_name() -> None:
    schema = {"type": "object", "description": "x" * 70_000}
    error = refused(output_config={"format": {"type": "json_schema", "schema": schema}})

    assert error.param == "output_config.format"
    assert "`output_config.format`" in error.message


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_structured_output_is_a_response_format(name: str) -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    fields = {name: {"format": wanted} if name == "output_config" else wanted}

    assert chat(**fields)["response_format"]["json_schema"]["schema"] == {"type": "object"}
    grammar = local(**fields).sampling.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"


@pytest.mark.parametrize(
    ("thinking", "kwargs"),
    [
        ({"type": "enabled", "budget_tokens": 2048}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "adaptive"}, {}),
        (None, {}),
    ],
)
def test_thinking_is_a_switch_of_a_local_models_template(thinking: Any, kwargs: dict[str, bool]) -> None:
    prompt = local(thinking=thinking).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_kwargs == kwargs
    assert "chat_template_kwargs" not in chat(thinking=thinking)


def test_a_short_user_id_goes_to_an_upstream_and_a_long_one_stays_here() -> None:
    assert chat(metadata={"user_id": "u1"})["user"] == "u1"
    assert "user" not in chat(metadata={"user_id": "user_" + "a" * 136})


def test_fields_of_betas_are_left_out_with_a_notice() -> None:
    form = to_chat(body(context_management={"edits": []}, output_config={"effort": "high"}, service_tier="auto"))

    assert form.fields.keys() == {"model", "messages", "max_tokens"}
    assert form.notices == ("no effect: output_config.effort", "unknown fields have no effect: context_management")


def test_a_notice_never_repeats_what_no_header_can_hold() -> None:
    form = to_chat(body(("user", [{"type": "x\r\ny"}])))
    assert form.notices == ("blocks told to the model as text: (unprintable)",)


def test_max_tokens_may_be_left_to_the_gateway() -> None:
    asked = body()
    del asked["max_tokens"]
    assert parse(asked, Defaults(max_tokens=77)).sampling.max_tokens == 77


def test_an_14_the_messages_are_what_strict_templates_take() -> None:
    turn = [{"type": "thinking", "thinking": "why", "signature": ""}, said("so"), used()]
    read = local_messages(
        ("system", "T"),
        ("user", "a"),
        ("system", "b"),
        ("user", "c"),
        ("assistant", turn),
        ("user", [result(content="r")]),
        ("assistant", [used("t2")]),
        ("user", [result("t2")]),
        ("assistant", "d"),
        ("assistant", "e"),
        ("user", "f"),
        system="S",
    )

    assert [message["role"] for message in read] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert all(isinstance(message["content"], str) for message in read if "tool_calls" not in message)
