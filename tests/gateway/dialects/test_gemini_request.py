"""Gemini bodies as the chat form: contents, tools and configuration, golden."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from backends.protocol.messages import ChatPrompt
from gateway.core.errors import InvalidRequest
from gateway.dialects.gemini import parse, to_chat
from gateway.dialects.sampling import Defaults, ParsedBody

IMAGE = {"inlineData": {"mimeType": "image/png", "data": "iVBO"}}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}
PDF = {"inlineData": {"mimeType": "application/pdf", "data": "JVBE", "displayName": "a.pdf"}}
VIDEO = {"inlineData": {"mimeType": "video/mp4", "data": "AAAA"}}
FILE = {"fileData": {"fileUri": "https://x/y.png", "mimeType": "image/png"}}
SCHEMA = {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}
JSON_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def said(value: str, **marks: Any) -> dict[str, Any]:
    return {"text": value} | marks


def called(name: Any = "f", **options: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": {"b": 1, "a": 2}} | options}


def result(response: Any = None, name: str = "f", **options: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": response} | options}


def body(*contents: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    sent = [{"role": role, "parts": parts} for role, parts in contents or [("user", [said("hi")])]]
    return {"model": "m", "stream": False, "contents": sent} | fields


def chat(*contents: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    return to_chat(body(*contents, **fields)).fields


def notices(*contents: tuple[str, Any], **fields: Any) -> tuple[str, ...]:
    return to_chat(body(*contents, **fields)).notices


def local(*contents: tuple[str, Any], **fields: Any) -> ParsedBody:
    return parse(body(*contents, **fields), Defaults())


def prompt_of(*contents: tuple[str, Any], **fields: Any) -> ChatPrompt:
    prompt = local(*contents, **fields).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def refused(*contents: tuple[str, Any], **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        local(*contents, **fields)
    return caught.value


def tools(*names: str, **more: Any) -> list[dict[str, Any]]:
    return [{"functionDeclarations": [{"name": name, "parameters": SCHEMA} for name in names]} | more]


def calling(**config: Any) -> dict[str, Any]:
    return {"functionCallingConfig": config}


# -------------------------------------------------------------------------------------------------------- contents


@pytest.mark.parametrize(
    "system", [{"parts": [said("Be brief.")], "role": "user"}, {"parts": [said("Be brief."), said("")]}, "Be brief."]
)
def test_system_instruction_and_texts(system: Any) -> None:
    assert chat(("user", [said("hi"), said("there")]), systemInstruction=system) == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi\n\nthere"}],
    }


def test_names_with_underscores_are_taken_too() -> None:
    sent = {
        "contents": {"parts": [{"inline_data": {"mime_type": "image/png", "data": "iVBO"}}]},
        "system_instruction": {"parts": [said("S")]},
        "generation_config": {"max_output_tokens": 5, "stop_sequences": ["x"], "top_p": 0.5},
    }
    assert to_chat(sent).fields == {
        "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": [IMAGE_PART]}],
        "max_tokens": 5,
        "stop": ["x"],
        "top_p": 0.5,
    }


def test_a_name_in_both_spellings_is_refused() -> None:
    error = refused(generationConfig={"topP": 0.5, "top_p": 0.6})
    assert error.param == "generationConfig.topP"


def test_consecutive_contents_of_a_role_are_one_turn_and_a_models_pieces_are_joined() -> None:
    asked = chat(
        ("user", [said("a")]),
        ("user", [said("b")]),
        ("model", [said("c"), said("d")]),
        ("model", [said("e"), called()]),
        ("user", [result({})]),
    )
    assert [message["role"] for message in asked["messages"]] == ["user", "assistant", "tool"]
    assert (asked["messages"][0]["content"], asked["messages"][1]["content"]) == ("a\n\nb", "cde")


def test_a_content_without_a_role_is_the_users() -> None:
    assert to_chat({"contents": [{"parts": [said("hi")]}]}).fields["messages"] == [{"role": "user", "content": "hi"}]


def test_empty_parts_and_contents_are_left_out() -> None:
    contents = (
        ("user", [said("a")]),
        ("model", []),
        ("model", [said("", thoughtSignature="x")]),
        ("user", [said("b")]),
    )
    assert chat(*contents)["messages"] == [{"role": "user", "content": "a\n\nb"}]
    assert notices(*contents) == ("contents without parts are left out",)


def test_thoughts_are_reasoning_content_and_signatures_are_never_read() -> None:
    turn = [said("why", thought=True), said("so", thoughtSignature="c2ln"), called() | {"thoughtSignature": "c2ln"}]
    assert chat(("user", [said("q")]), ("model", turn), ("user", [result({})]))["messages"][1] == {
        "role": "assistant",
        "content": "so",
        "reasoning_content": "why",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}}
        ],
    }


def test_a_prefill_is_continued() -> None:
    assert chat(("user", [said("a")]), ("model", [said("{")]))["continue_final_message"] is True
    assert chat(("user", [said("a")]), ("model", [said("{")]))["add_generation_prompt"] is False
    prompt = prompt_of(("user", [said("a")]), ("model", [said("{")]))
    assert (prompt.continue_final_message, prompt.messages[-1]["content"]) == (True, "{")


@pytest.mark.parametrize("last", [[called()], [said("x", thought=True)]])
def test_what_has_no_text_to_continue_is_no_prefill(last: Any) -> None:
    assert "continue_final_message" not in chat(("user", [said("a")]), ("model", last))


def test_parts_that_nobody_knows_are_told_as_text_with_a_notice() -> None:
    code = {"executableCode": {"language": "PYTHON", "code": "é"}}
    contents = (("user", [said("q")]), ("model", [code]), ("user", [{"newThing": {"x": 1}}]))

    messages = chat(*contents)["messages"]
    assert messages[1]["content"] == '[executableCode] {"language": "PYTHON", "code": "é"}'
    assert messages[2]["content"] == '[newThing] {"x": 1}'
    assert notices(*contents) == ("parts told to the model as text: executableCode, newThing",)


# --------------------------------------------------------------------------------------------------- calls and results


def test_tc_results_come_first_each_as_a_tool_message_and_nothing_is_dropped() -> None:
    turn = [
        said("before"),
        result({"output": "ok"}, id="t1"),
        result({"error": "boom"}, id="t2"),
        result({"output": {"x": "é"}}, id="t3"),
        result({"result": [1]}, id="t4"),
        result(None, id="t5"),
        result({"output": "half", "error": "cut"}, id="t6"),
        said("go on"),
    ]
    calls = [called(id=f"t{number}") for number in range(1, 7)]
    messages = chat(("user", [said("q")]), ("model", calls), ("user", turn))["messages"]

    assert [(message["tool_call_id"], message["content"]) for message in messages[2:-1]] == [
        ("t1", "ok"),
        ("t2", "[error]\n\nboom"),
        ("t3", '{"x": "é"}'),
        ("t4", '{"result": [1]}'),
        ("t5", ""),
        ("t6", "[error]\n\ncut\n\nhalf"),
    ]
    assert messages[-1] == {"role": "user", "content": "before\n\ngo on"}


def test_calls_without_ids_meet_their_results_by_name_and_order() -> None:
    calls = [called("f"), called("g"), called("f")]
    results = [result({}, "g"), result({}, "f"), result({}, "f")]
    messages = chat(("user", [said("q")]), ("model", calls), ("user", results))["messages"]

    assert [call["id"] for call in messages[1]["tool_calls"]] == ["call_1", "call_2", "call_3"]
    assert [message["tool_call_id"] for message in messages[2:]] == ["call_2", "call_1", "call_3"]


def test_a_result_that_belongs_to_no_call_keeps_an_id_of_its_own() -> None:
    messages = chat(("user", [result({}, "f"), result({}, "f", id="x")]))["messages"]
    assert [message["tool_call_id"] for message in messages] == ["call_1", "x"]


def test_an_image_in_or_beside_a_result_goes_to_the_upstream_behind_the_tool_message() -> None:
    inside = result({"output": "see"}, parts=[IMAGE])
    beside = [result({"output": "see"}), IMAGE]

    assert chat(("user", [inside]))["messages"] == [
        {"role": "tool", "tool_call_id": "call_1", "content": "see\n\n[image_url attached below]"},
        {"role": "user", "content": [IMAGE_PART]},
    ]
    assert chat(("user", beside))["messages"] == [
        {"role": "tool", "tool_call_id": "call_1", "content": "see"},
        {"role": "user", "content": [IMAGE_PART]},
    ]


@pytest.mark.parametrize("media", [IMAGE, PDF, VIDEO, FILE])
def test_what_a_text_model_cannot_see_in_or_beside_a_result_is_said_to_it_and_to_the_client(media: Any) -> None:
    shown = next(iter(media.values()))["mimeType"]
    for turn in ([result({"output": "see"}, parts=[media])], [result({"output": "see"}), media]):
        parsed = local(("user", turn), ("user", [said("hi")]))
        assert isinstance(parsed.prompt, ChatPrompt)
        told = "\n".join(str(message["content"]) for message in parsed.prompt.messages)
        assert f"[{shown} left out: the model can't read it]" in told
        assert f"left out of tool results, since the model can't read them: {shown}" in parsed.notices


# ------------------------------------------------------------------------------------------------------------- media


def test_images_audio_and_pdf_are_passed_to_an_upstream() -> None:
    audio = {"inlineData": {"mimeType": "audio/mpeg", "data": "SUQz"}}
    assert chat(("user", [said("see"), IMAGE, FILE, PDF, audio]))["messages"][0]["content"] == [
        {"type": "text", "text": "see"},
        IMAGE_PART,
        {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBE"}},
        {"type": "input_audio", "input_audio": {"data": "SUQz", "format": "mp3"}},
    ]


@pytest.mark.parametrize(
    ("media", "key"), [(IMAGE, "inlineData"), (PDF, "inlineData"), (VIDEO, "inlineData"), (FILE, "fileData")]
)
def test_a_users_own_media_are_refused_for_a_text_model_by_their_place(media: Any, key: str) -> None:
    error = refused(("user", [said("q")]), ("model", [said("a")]), ("user", [said("see"), media]))
    assert error.param == f"contents[2].parts[1].{key}"
    assert "text-only" in error.message


@pytest.mark.parametrize("media", [VIDEO, {"fileData": {"fileUri": "gs://b/x.png", "mimeType": "image/png"}}])
def test_what_chat_cannot_carry_is_refused_for_an_upstream(media: Any) -> None:
    with pytest.raises(InvalidRequest, match="inlineData"):
        chat(("user", [media]))


def test_text_that_is_sent_as_data_is_text() -> None:
    data = base64.b64encode("é, x".encode()).decode()
    part = {"inlineData": {"mimeType": "text/csv; charset=utf-8", "data": data}}
    assert prompt_of(("user", [said("see"), part])).messages[0]["content"] == "see\n\né, x"
    assert refused(("user", [{"inlineData": {"mimeType": "text/plain", "data": "?"}}])).param == (
        "contents[0].parts[0].inlineData.data"
    )


# ------------------------------------------------------------------------------------------------------------- tools


def test_tools_of_all_entries_are_one_list_with_json_schemas() -> None:
    more = {
        "functionDeclarations": [{"name": "g", "description": "d", "parametersJsonSchema": JSON_SCHEMA}, {"name": "h"}]
    }
    asked = chat(tools=[*tools("f"), more])

    assert asked["tools"] == [
        {"type": "function", "function": {"name": "f", "parameters": JSON_SCHEMA}},
        {"type": "function", "function": {"name": "g", "description": "d", "parameters": JSON_SCHEMA}},
        {"type": "function", "function": {"name": "h", "parameters": {"type": "object", "properties": {}}}},
    ]
    assert "tool_choice" not in asked


def test_tools_that_only_google_offers_are_left_out_with_a_notice() -> None:
    offered = [{"googleSearch": {}}, {"url_context": {}}, {"codeExecution": {}}]
    assert [tool["function"]["name"] for tool in chat(tools=[*offered, *tools("f")])["tools"]] == ["f"]
    assert notices(tools=offered) == (
        "tools that only Google offers are left out: googleSearch, urlContext, codeExecution",
    )


@pytest.mark.parametrize(
    ("config", "choice", "names"),
    [
        ({"mode": "AUTO"}, "auto", ["f", "g"]),
        ({"mode": "VALIDATED"}, "auto", ["f", "g"]),
        ({"mode": "any"}, "required", ["f", "g"]),
        ({"mode": "NONE"}, "none", ["f", "g"]),
        ({"mode": "ANY", "allowedFunctionNames": ["g"]}, "required", ["g"]),
        ({"mode": "AUTO", "allowed_function_names": ["g"]}, "auto", ["g"]),
        ({"mode": "NONE", "allowedFunctionNames": ["g"]}, "none", ["f", "g"]),
    ],
)
def test_modes_of_calling(config: dict[str, Any], choice: str, names: list[str]) -> None:
    asked = chat(tools=tools("f", "g"), toolConfig=calling(**config))
    assert asked["tool_choice"] == choice
    assert [tool["function"]["name"] for tool in asked["tools"]] == names


def test_validated_calls_are_said_to_be_served_as_auto() -> None:
    config = calling(mode="VALIDATED")
    assert notices(tools=tools("f"), toolConfig=config) == (
        "served as AUTO: toolConfig.functionCallingConfig.mode VALIDATED",
    )


def test_a_forced_call_is_forced_by_a_grammar_and_no_tools_are_told_for_none() -> None:
    prompt = prompt_of(tools=tools("f", "g"), toolConfig=calling(mode="ANY", allowedFunctionNames=["g"]))
    assert prompt.tools is not None
    assert [tool["function"]["name"] for tool in prompt.tools] == ["g"]
    assert prompt.forced_calls > 0
    assert prompt_of(tools=tools("f"), toolConfig=calling(mode="NONE")).tools is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"toolConfig": calling(mode="ANY")}, "mode"),
        ({"tools": [{"googleSearch": {}}], "toolConfig": calling(mode="ANY")}, "mode"),
        ({"tools": tools("f"), "toolConfig": calling(mode="SOME")}, "mode"),
        ({"tools": tools("f"), "toolConfig": calling(allowedFunctionNames=["g"])}, "allowedFunctionNames"),
        ({"tools": tools("f"), "toolConfig": calling(allowedFunctionNames=[1])}, "allowedFunctionNames"),
    ],
)
def test_modes_that_cannot_be_kept_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == f"toolConfig.functionCallingConfig.{param}"


def test_a_name_that_openai_does_not_take_is_changed_for_an_upstream_in_tools_and_history() -> None:
    form = to_chat(
        body(("user", [said("q")]), ("model", [called("a.b:c")]), ("user", [result({}, "a.b:c")]), tools=tools("a.b:c"))
    )
    sent = form.fields["tools"][0]["function"]["name"]

    assert form.fields["messages"][1]["tool_calls"][0]["function"]["name"] == sent != "a.b:c"
    assert form.context.tool_names == {sent: "a.b:c"}
    assert prompt_of(tools=tools("a.b:c")).tools[0]["function"]["name"] == "a.b:c"  # type: ignore[index]


# ----------------------------------------------------------------------------------------------------- configuration


def test_sampling_by_their_names_in_chat() -> None:
    config = {
        "temperature": 0.5,
        "topP": 0.9,
        "topK": 64.0,
        "maxOutputTokens": 100,
        "stopSequences": ["##"],
        "candidateCount": 2,
        "seed": 7,
        "presencePenalty": 0.1,
        "frequencyPenalty": 0.2,
    }
    sampling = local(generationConfig=config).sampling

    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 64, 100)
    assert (sampling.stop, sampling.n, sampling.seed) == (("##",), 2, 7)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.2)


def test_top_k_is_not_sent_to_an_upstream_that_may_refuse_it() -> None:
    assert "top_k" not in chat(generationConfig={"topK": 64})
    assert notices(generationConfig={"topK": 64}) == (
        "no effect on an upstream that speaks OpenAI's chat: generationConfig.topK",
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"responseMimeType": "text/plain"}, None),
        ({"responseMimeType": "application/json"}, {"type": "json_object"}),
        ({"responseMimeType": "application/json", "responseSchema": SCHEMA}, JSON_SCHEMA),
        ({"responseMimeType": "application/json", "responseJsonSchema": JSON_SCHEMA}, JSON_SCHEMA),
        ({"_responseJsonSchema": JSON_SCHEMA}, JSON_SCHEMA),
    ],
)
def test_structured_output(config: dict[str, Any], expected: Any) -> None:
    said_format = chat(generationConfig=config).get("response_format")
    if expected is JSON_SCHEMA:
        assert said_format["json_schema"] == {"name": "answer", "schema": JSON_SCHEMA, "strict": True}
    else:
        assert said_format == expected


@pytest.mark.parametrize(
    ("config", "kwargs"),
    [
        ({"thinkingBudget": 0}, {"enable_thinking": False}),
        ({"thinkingBudget": 8192, "includeThoughts": True}, {"enable_thinking": True}),
        ({"thinkingBudget": -1}, {}),
        ({"includeThoughts": True, "thinkingLevel": "HIGH"}, {}),
    ],
)
def test_a_budget_of_thoughts_moves_a_local_templates_switch(config: dict[str, Any], kwargs: dict[str, Any]) -> None:
    parsed = local(generationConfig={"thinkingConfig": config})
    assert isinstance(parsed.prompt, ChatPrompt)
    assert parsed.prompt.template_kwargs == kwargs
    assert parsed.context.include_thoughts is config.get("includeThoughts", False)
    assert "chat_template_kwargs" not in chat(generationConfig={"thinkingConfig": config})


def test_what_a_client_says_of_the_template_itself_wins() -> None:
    config = {"thinkingConfig": {"thinkingBudget": 0}}
    prompt = prompt_of(generationConfig=config, chat_template_kwargs={"enable_thinking": True, "x": 1})
    assert prompt.template_kwargs == {"enable_thinking": True, "x": 1}


def test_our_own_fields_are_taken_as_in_chat() -> None:
    parsed = local(cache_salt="s", min_p=0.1)
    assert (parsed.cache_salt, parsed.sampling.min_p, parsed.notices) == ("s", 0.1, ())


def test_what_has_no_effect_is_said() -> None:
    sent = body(
        safetySettings=[{"category": "X"}],
        generationConfig={"speechConfig": {"a": 1}, "newField": 1, "responseModalities": ["TEXT", "IMAGE"]},
        toolConfig={"retrievalConfig": {}},
        somethingNew=1,
        labels={"a": "b"},
    )
    assert to_chat(sent).notices == (
        "no effect: safetySettings, toolConfig.retrievalConfig, generationConfig.speechConfig, "
        "generationConfig.responseModalities beyond TEXT, generationConfig.newField",
        "unknown fields have no effect: somethingNew",
    )


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"contents": None}, "contents"),
        ({"contents": []}, "contents"),
        ({"contents": "hi"}, "contents"),
        ({"contents": [1]}, "contents[0]"),
        ({"contents": [{"role": "system", "parts": [said("x")]}]}, "contents[0].role"),
        ({"contents": [{"role": 1, "parts": [said("x")]}]}, "contents[0].role"),
        ({"contents": [{"parts": {}}]}, "contents[0].parts"),
        ({"contents": [{"parts": [{"text": 1}]}]}, "contents[0].parts[0].text"),
        ({"contents": [{"parts": [{"text": "x", "thought": 1}]}]}, "contents[0].parts[0].thought"),
        ({"contents": [{"parts": [{"text": "x"} | IMAGE]}]}, "contents[0].parts[0]"),
        ({"contents": [{"parts": [called()]}]}, "contents[0].parts[0]"),
        ({"contents": [{"parts": [said("x", thought=True)]}]}, "contents[0].parts[0]"),
        ({"contents": [{"role": "model", "parts": [result({})]}]}, "contents[0].parts[0]"),
        ({"contents": [{"role": "model", "parts": [IMAGE]}]}, "contents[0].parts[0]"),
        ({"contents": [{"role": "model", "parts": [called("")]}]}, "contents[0].parts[0].functionCall.name"),
        ({"contents": [{"role": "model", "parts": [called(args=[])]}]}, "contents[0].parts[0].functionCall.args"),
        ({"contents": [{"role": "model", "parts": [called(id=1)]}]}, "contents[0].parts[0].functionCall.id"),
        ({"contents": [{"parts": [result([])]}]}, "contents[0].parts[0].functionResponse.response"),
        ({"contents": [{"parts": [result({}, parts=1)]}]}, "contents[0].parts[0].functionResponse.parts"),
        ({"contents": [{"parts": [{"inlineData": {"data": "x"}}]}]}, "contents[0].parts[0].inlineData.mimeType"),
        ({"contents": [{"parts": [{"fileData": {}}]}]}, "contents[0].parts[0].fileData.fileUri"),
        ({"systemInstruction": {"parts": [IMAGE]}}, "systemInstruction.parts[0]"),
        ({"systemInstruction": 1}, "systemInstruction"),
        ({"tools": 1}, "tools"),
        ({"tools": [{"functionDeclarations": {}}]}, "tools[0].functionDeclarations"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDeclarations[0].name"),
        ({"tools": [{"functionDeclarations": [{"name": 'a"'}]}]}, "tools[0].functionDeclarations[0].name"),
        (
            {"tools": [{"functionDeclarations": [{"name": "f", "parameters": {"type": "ARRAY"}}]}]},
            "tools[0].functionDeclarations[0].parameters.type",
        ),
        ({"cachedContent": "cachedContents/x"}, "cachedContent"),
        ({"generationConfig": []}, "generationConfig"),
        ({"generationConfig": {"temperature": 3}}, "generationConfig.temperature"),
        ({"generationConfig": {"topP": "x"}}, "generationConfig.topP"),
        ({"generationConfig": {"maxOutputTokens": 0}}, "generationConfig.maxOutputTokens"),
        ({"generationConfig": {"candidateCount": 9}}, "generationConfig.candidateCount"),
        ({"generationConfig": {"stopSequences": ["x"] * 17}}, "generationConfig.stopSequences"),
        ({"generationConfig": {"stopSequences": [""]}}, "generationConfig.stopSequences"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "generationConfig.responseMimeType"),
        ({"generationConfig": {"responseModalities": ["IMAGE"]}}, "generationConfig.responseModalities"),
        (
            {"generationConfig": {"responseSchema": SCHEMA, "responseJsonSchema": {}}},
            "generationConfig.responseJsonSchema",
        ),
        (
            {"generationConfig": {"responseMimeType": "text/plain", "responseSchema": SCHEMA}},
            "generationConfig.responseMimeType",
        ),
        (
            {"generationConfig": {"thinkingConfig": {"thinkingBudget": "x"}}},
            "generationConfig.thinkingConfig.thinkingBudget",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_its_place(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert f"`{param}" in error.message


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    deep: Any = {}
    for _ in range(200):
        deep = {"items": deep}
    assert "nested too deeply" in refused(generationConfig={"responseSchema": deep}).message


ODD = (True, 1, "x", [], {}, [[]], [{}], {"parts": [[]]}, {"functionCallingConfig": 1}, json.loads("1e400"))
NAMES = ("contents", "tools", "toolConfig", "generationConfig", "systemInstruction", "safetySettings")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ODD)
def test_odd_json_is_answered_or_refused_by_its_place(name: str, value: Any) -> None:
    try:
        local(**{name: value})
    except InvalidRequest as error:
        param = error.param or ""
        if not param.startswith(name):
            raise


@pytest.mark.parametrize("role", [["user"], [{}], {"type": "user"}, 5, "zz"])
def test_a_role_of_any_other_kind_is_refused_by_its_place(role: Any) -> None:
    assert refused((role, [said("q")])).param == "contents[0].role"
