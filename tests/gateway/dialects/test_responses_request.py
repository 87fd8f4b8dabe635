"""Bodies of the Responses dialect: what becomes of each field and item, what is refused, and by which name."""

from __future__ import annotations

import json

import pytest
from responses_support import TOOLS

from gateway.core.errors import InvalidRequest
from gateway.dialects.openai_responses import parse, to_chat
from gateway.dialects.sampling import Defaults

OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "ok"}
CALL = {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": "{}"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}


def chat(given="hi", **fields):
    return to_chat({"model": "m", "input": given, **fields}).fields


def messages(*items, **fields):
    return chat(list(items), **fields)["messages"]


def notices(given="hi", **fields):
    return to_chat({"model": "m", "input": given, **fields}).notices


def refused(given="hi", read=to_chat, **fields):
    body = {"model": "m", "input": given, **fields}
    with pytest.raises(InvalidRequest) as error:
        read(body) if read is to_chat else read(body, Defaults())
    assert error.value.param is not None
    return error.value


# ------------------------------------------------------------------------------------------------------- input items


def test_a_string_is_a_message_of_the_user():
    assert chat("hi") == {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_rs_08_a_second_turn_is_understood():
    assert messages(
        {"role": "user", "content": "x"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "ok"}]},
    ) == [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
    ]  # fmt: skip


@pytest.mark.parametrize("content", [None, [], [{"type": "reasoning_text", "text": "because"}]])
def test_rs_08_reasoning_comes_back_in_the_message_that_it_led_to(content):
    said = messages(
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "because"}], "content": content},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Yes", "annotations": []}],
        },
        CALL,
    )

    assert [(m["role"], m["content"], m["reasoning_content"]) for m in said] == [("assistant", "Yes", "because")]
    assert said[0]["tool_calls"][0]["id"] == "c1"


def test_rs_08_encrypted_reasoning_is_left_out_and_said():
    items = [{"role": "user", "content": "x"}, {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}]

    assert len(chat(items)["messages"]) == 1
    assert "encrypted reasoning left out" in notices(items)[0]


def test_each_answer_is_a_message_of_its_own():
    said = messages(
        {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}
    )

    assert [(m["role"], m["content"]) for m in said] == [("assistant", "a"), ("assistant", "b"), ("user", "c")]


def test_text_and_reasoning_between_calls_stay_in_their_message():
    said = messages(
        {"role": "assistant", "content": "a"},
        CALL,
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"role": "assistant", "content": "b"},
        CALL | {"call_id": "c2"},
        OUTPUT,
        OUTPUT | {"call_id": "c2"},
        {"role": "assistant", "content": "c"},
    )

    assert [m["role"] for m in said] == ["assistant", "tool", "tool", "assistant"]
    assert (said[0]["content"], said[0]["reasoning_content"]) == ("ab", "hm")
    assert len(said[0]["tool_calls"]) == 2


def test_calls_of_one_answer_stay_together():
    said = messages(CALL, CALL | {"call_id": "c2"}, OUTPUT | {"call_id": "c2"}, OUTPUT)

    assert [call["id"] for call in said[0]["tool_calls"]] == ["c1", "c2"]
    assert [m["tool_call_id"] for m in said[1:]] == ["c2", "c1"]


@pytest.mark.parametrize(
    ("items", "ids"),
    [
        ([OUTPUT], ["c1"]),
        ([CALL, OUTPUT | {"call_id": "other"}], ["other"]),
        ([CALL, OUTPUT, OUTPUT], ["c1", "c1"]),
        ([CALL | {"call_id": ""}, OUTPUT | {"call_id": None}], ["call_0"]),
        ([CALL | {"call_id": None, "id": "fc_1"}, {"type": "function_call_output", "output": "x"}], ["fc_1"]),
        ([{"type": "function_call_output", "output": "x"}], ["call_unknown"]),
    ],
)
def test_tc_13_no_result_is_dropped_whatever_its_id(items, ids):
    said = messages({"role": "user", "content": "x"}, *items)

    assert [m["tool_call_id"] for m in said if m["role"] == "tool"] == ids
    parse({"model": "m", "input": items, "tools": TOOLS}, Defaults())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "{}"), ("   ", "{}"), ("null", "{}"), (None, "{}"), ('{"a": 1}', '{"a": 1}'), ({"a": 1}, '{"a":1}'),
        ('{"a":1', '{"_raw":"{\\"a\\":1"}'), ("[1]", '{"_raw":"[1]"}'),
    ],
)  # fmt: skip
def test_tc_09_arguments_in_history_are_always_an_object(arguments, expected):
    said = messages(CALL | {"arguments": arguments})

    assert said[0]["tool_calls"][0]["function"]["arguments"] == expected
    assert isinstance(json.loads(expected), dict)


def test_custom_and_client_run_calls_are_calls_of_functions():
    said = messages(
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "a\nb"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "local_shell_call", "id": "ls", "call_id": "c2", "status": "completed",
         "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "id": "c2", "output": '{"output":"a"}'},
    )  # fmt: skip

    assert said[0]["tool_calls"][0]["function"] == {"name": "apply_patch", "arguments": '{"input":"a\\nb"}'}
    assert said[2]["tool_calls"][0]["function"]["name"] == "local_shell"
    assert (said[3]["tool_call_id"], said[3]["content"]) == ("c2", '{"output":"a"}')


def test_system_texts_at_the_beginning_are_one_message():
    said = messages(
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "b"}]},
        {"role": "system", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "developer", "content": "e"},
        instructions="a",
    )

    assert [(m["role"], m["content"]) for m in said] == [("system", "a\n\nb\n\nc"), ("user", "d"), ("system", "e")]


def test_images_and_files_go_to_upstreams_as_their_parts():
    content = [{"type": "input_text", "text": "see"}, IMAGE | {"detail": "high"},
               {"type": "input_file", "filename": "a.pdf", "file_data": "data:x"}]  # fmt: skip

    assert messages({"role": "user", "content": content})[0]["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "high"}},
        {"type": "file", "file": {"file_data": "data:x", "filename": "a.pdf"}},
    ]


def test_an_image_for_a_text_model_is_refused_so_that_codex_takes_it_out():
    in_message = refused([{"role": "user", "content": [{"type": "input_text", "text": "a"}, IMAGE]}], parse)
    in_result = refused([CALL, OUTPUT | {"output": [IMAGE]}], parse)

    assert (in_message.param, in_message.code) == ("input[0].content[1].image_url", "invalid_value")
    assert (in_result.param, in_result.code) == ("input[1].output[0].image_url", "invalid_value")


def test_what_only_the_vendor_did_is_left_out_and_said():
    items = [{"role": "user", "content": "x"}, {"type": "web_search_call", "id": "ws_1", "status": "completed"}]

    assert len(chat(items)["messages"]) == 1
    assert notices(items) == ("items left out, which only the vendor's own servers understand: web_search_call",)


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([], "input"),
        (3, "input"),
        (None, "input"),
        ([3], "input[0]"),
        ([{"type": "strange"}], "input[0].type"),
        ([{"content": "x"}], "input[0].type"),
        ([{"role": "robot", "content": "x"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": [3]}], "input[0].content[0]"),
        ([{"role": "user", "content": [{"type": "smell"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}], "input[0].content[0].file_id"),
        (
            [{"role": "user", "content": [{"type": "input_file", "file_url": "http://x"}]}],
            "input[0].content[0].file_url",
        ),
        ([{"role": "system", "content": [IMAGE]}], "input[0].content[0]"),
        ([{"type": "function_call", "call_id": "c", "name": "", "arguments": "{}"}], "input[0].name"),
        ([{"type": "custom_tool_call", "call_id": "c", "name": "a", "input": 3}], "input[0].input"),
        ([{"type": "function_call_output", "call_id": "c"}], "input[0].output"),
        ([{"type": "compaction", "encrypted_content": "x"}], "input[0]"),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0]"),
    ],
)
def test_rs_08_what_is_not_understood_is_refused_by_its_path(items, param):
    assert refused(items).param == param


# ------------------------------------------------------------------------------------------------------------- tools


def test_tools_become_functions_with_names_that_lead_back():
    form = to_chat({"model": "m", "input": "x", "tools": TOOLS})

    functions = [tool["function"] for tool in form.fields["tools"]]
    assert [function["name"] for function in functions] == ["shell", "apply_patch", "crm__find", "crm__note"]
    assert functions[1]["parameters"]["required"] == ["input"]
    assert functions[1]["description"].startswith("Edits files.")
    assert "(lark):\nstart: /.+/" in functions[1]["description"]
    table = form.context.table
    assert (table.restore("crm__note").name, table.restore("crm__note").namespace) == ("note", "crm")
    assert table.restore("crm__note").custom


def test_a_namespace_that_ends_like_codex_names_its_servers_is_joined_as_it_is():
    tool = {"type": "namespace", "name": "mcp__fs__", "tools": [{"type": "function", "name": "read"}]}

    assert chat(tools=[tool])["tools"][0]["function"]["name"] == "mcp__fs__read"


@pytest.mark.parametrize(("namespace", "name"), [("a b", "c"), ("n" * 60, "m" * 60), ("ü", "x"), ("a.b", "c")])
def test_a_joined_name_fits_what_servers_take_and_leads_back(namespace, name):
    tool = {"type": "namespace", "name": namespace, "tools": [{"type": "function", "name": name}]}
    form = to_chat({"model": "m", "input": [CALL | {"name": name, "namespace": namespace}], "tools": [tool]})

    flat = form.fields["tools"][0]["function"]["name"]
    assert flat.isascii()
    assert len(flat) <= 64
    assert (form.context.table.restore(flat).namespace, form.context.table.restore(flat).name) == (namespace, name)
    assert form.fields["messages"][0]["tool_calls"][0]["function"]["name"] == flat
    without = to_chat({"model": "m", "input": [CALL | {"name": name, "namespace": namespace}]})
    assert without.fields["messages"] == form.fields["messages"]


def test_two_tools_never_share_a_name():
    tools = [{"type": "function", "name": "crm__find"}, *TOOLS]

    form = to_chat({"model": "m", "input": "x", "tools": tools})

    flats = [tool["function"]["name"] for tool in form.fields["tools"]]
    assert len(set(flats)) == 5
    assert form.context.table.restore(flats[0]).namespace is None
    assert form.context.table.restore(flats[3]).namespace == "crm"


def test_tools_of_the_vendors_servers_are_left_out_and_said():
    tools = [{"type": "web_search"}, {"type": "local_shell"}, {"type": "image_generation"}, *TOOLS]

    assert len(chat(tools=tools)["tools"]) == 4
    assert notices(tools=tools)[0].endswith("web_search, local_shell, image_generation")
    assert "tools" not in chat(tools=[{"type": "web_search"}], tool_choice="auto", parallel_tool_calls=True)


def test_items_may_add_tools():
    item = {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "later"}]}

    form = to_chat({"model": "m", "input": [item, {"role": "user", "content": "x"}], "tools": TOOLS})

    assert form.fields["tools"][-1]["function"]["name"] == "later"
    assert len(form.fields["messages"]) == 1


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        ("auto", "auto", 4),
        ("none", "none", 4),
        ("required", "required", 4),
        ({"type": "function", "name": "shell"}, {"type": "function", "function": {"name": "shell"}}, 4),
        ({"type": "custom", "name": "apply_patch"}, {"type": "function", "function": {"name": "apply_patch"}}, 4),
        ({"type": "function", "name": "find"}, {"type": "function", "function": {"name": "crm__find"}}, 4),
        ({"type": "function", "name": "find", "namespace": "crm"},
         {"type": "function", "function": {"name": "crm__find"}}, 4),
        ({"type": "allowed_tools", "mode": "required",
          "tools": [{"type": "function", "name": "shell"}, {"type": "image_generation"}]}, "required", 1),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "crm"}]}, "auto", 2),
    ],
)  # fmt: skip
def test_rv_06_every_tool_choice_has_its_chat_form(choice, expected, names):
    fields = chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)

    assert fields["tool_choice"] == expected
    assert len(fields["tools"]) == names
    assert fields["parallel_tool_calls"] is False


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("sometimes", "tool_choice"),
        (3, "tool_choice"),
        ({"type": "web_search_preview"}, "tool_choice.type"),
        ({"type": "function"}, "tool_choice.name"),
        ({"type": "function", "name": "nothing"}, "tool_choice.name"),
        ({"type": "allowed_tools", "mode": "never", "tools": [{}]}, "tool_choice.mode"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "tool_choice.tools"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}, "tool_choice.tools"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]},
         "tool_choice.tools[0].name"),
    ],
)  # fmt: skip
def test_a_tool_choice_that_cannot_be_met_is_refused(choice, param):
    assert refused(tools=TOOLS, tool_choice=choice).param == param


def test_a_required_call_without_a_tool_is_refused():
    assert refused(tools=[{"type": "web_search"}], tool_choice="required").param == "tool_choice"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        (3, "tools"),
        ([3], "tools[0]"),
        ([{}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].name"),
        ([{"type": "function", "name": "f", "parameters": 3}], "tools[0].parameters"),
        ([{"type": "function", "name": "f", "description": 3}], "tools[0].description"),
        ([{"type": "custom", "name": "f", "format": {"type": "odd"}}], "tools[0].format"),
        ([{"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "bnf"}}], "tools[0].format"),
        ([{"type": "namespace", "name": "n"}], "tools[0].tools"),
        ([{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}], "tools[0].tools[0].type"),
        ([{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}], "tools[0].tools[0].name"),
    ],
)
def test_a_bad_tool_is_refused_by_its_path(tools, param):
    assert refused(tools=tools).param == param


# ------------------------------------------------------------------------------------------------------ other fields


def test_fields_have_their_chat_names():
    schema = {"type": "object"}

    fields = chat(
        max_output_tokens=5, temperature=0.5, top_p=0.9, reasoning={"effort": "high"}, store=False, metadata={"a": "b"},
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}, "verbosity": "low"},
        include=["reasoning.encrypted_content", "message.output_text.logprobs"], top_logprobs=2, prompt_cache_key="k",
    )  # fmt: skip

    assert {name: value for name, value in fields.items() if name not in ("model", "messages")} == {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "reasoning_effort": "high",
        "verbosity": "low",
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
    }


def test_rv_16_fields_for_the_server_that_generates_go_on_to_it():
    fields = chat(top_k=20, chat_template_kwargs={"enable_thinking": False}, foo=None)

    assert (fields["top_k"], fields["chat_template_kwargs"]) == (20, {"enable_thinking": False})
    assert "foo" not in fields


def test_what_codex_and_cc_switch_send_has_no_error_on_a_model_that_does_not_reason():
    body = {
        "model": "m", "instructions": None, "input": [{"role": "user", "content": "x"}], "tools": TOOLS,
        "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"effort": "high", "summary": "auto"},
        "store": False, "stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
        "client_metadata": {"a": "b"}, "service_tier": None, "text": {"verbosity": "medium"},
    }  # fmt: skip

    parsed = parse(body, Defaults(max_tokens=7))

    assert parsed.sampling.max_tokens == 7
    assert parsed.notices == ("reasoning.summary has no effect: reasoning is given whole",)


@pytest.mark.parametrize("said", ["auto", "disabled"])
def test_nothing_is_cut_off_silently_and_chat_has_no_such_field(said):
    body = {"model": "m", "input": "hi", "truncation": said}

    assert [notice.split(":")[0] for notice in parse(body, Defaults()).notices] == ["truncation has no effect"] * (
        said == "auto"
    )
    assert set(to_chat(body).fields) == {"model", "messages"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"truncation": "sometimes"}, "truncation"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "5"}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": "x"}, "include"),
        ({"instructions": ["x"]}, "instructions"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"reasoning": "high"}, "reasoning"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"store": "no"}, "store"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
def test_a_field_that_cannot_be_met_is_refused_by_its_name(fields, param):
    error = refused(**fields)

    assert error.param == param
    assert f"`{param.split('.')[0]}" in error.message


def test_what_the_chat_form_finds_wrong_is_said_of_this_apis_fields():
    big = {"type": "json_schema", "name": "n", "schema": {"type": "object", "x": "y" * 70_000}}
    tools = [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": {"type": "string"}}]

    in_format = refused(read=parse, text={"format": big})
    in_tool = refused(read=parse, tools=tools, tool_choice="required")

    assert (in_format.param, "`text.format`" in in_format.message) == ("text.format", True)
    assert (in_tool.param, "tools[1]" in in_tool.message) == ("tools[1]", True)
