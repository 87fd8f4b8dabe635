"""Earlier calls and results, in words or as a template prints them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level

from backends.protocol.messages import ChatPrompt
from backends.text.call_history import arguments_object, in_words, short_id, with_call_objects
from backends.text.loading import ModelText
from backends.text.tokenizer import PromptError, TextCodec

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SYSTEM, USER = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is in a.txt?"}


def call(arguments: object = '{"path":"a.txt"}', identity: str = "call_1", name: str = "look") -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def result(content: str, identity: str = "call_1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identity, "content": content}


def test_calls_and_results_in_words_are_documented():
    messages = [USER, calling(call(), call("", "call_2"), content="I look."), result("one"), result("two", "call_2")]
    assert in_words(messages) == [
        USER,
        {
            "role": "assistant",
            "content": 'I look.\n<tool_call>\n{"name":"look","arguments":{"path":"a.txt"}}\n</tool_call>\n'
            '<tool_call>\n{"name":"look","arguments":{}}\n</tool_call>',
        },
        {
            "role": "user",
            "content": "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>",
        },
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        ("   ", {}),
        ("null", {}),
        (None, {}),
        ('{"a":1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ('{"a":1', {"_raw": '{"a":1'}),
        ("[1]", {"_raw": [1]}),
        ("[" * 100_000, {"_raw": "[" * 100_000}),
    ],
)
def test_tc_09_a_bad_call_in_the_history_does_not_end_the_conversation(arguments, expected):
    assert arguments_object(arguments) == expected
    (message,) = with_call_objects([calling(call(arguments))])
    assert message["tool_calls"][0]["function"]["arguments"] == expected
    assert (
        json.dumps(expected, ensure_ascii=False, separators=(",", ":"))
        in in_words([calling(call(arguments))])[0]["content"]
    )


@pytest.mark.parametrize(
    "messages",
    [
        [USER, calling(call(), call(identity="call_2")), result("one")],
        [USER, result("one", "nobody")],
        [USER, calling(call()), result("one"), result("again")],
        [USER, calling({"function": {"name": "look"}}), {"role": "tool", "content": "one"}],
    ],
)
def test_tc_13_calls_and_results_that_do_not_pair_are_rendered_in_order(messages):
    words = in_words(messages)
    said = "\n".join(message["content"] for message in words)
    assert [part in said for part in ("What is", "one")] == [True, True]
    assert said.count("<tool_response>") == sum(message["role"] == "tool" for message in messages)


def codec(template: Any, *, takes_tools: bool = True, tool_format: str = "hermes") -> TextCodec:
    return TextCodec(ModelText(byte_level(), template, template_takes_tools=takes_tools, tool_format=tool_format))


def chatml(messages: list[dict[str, Any]], *, add_generation_prompt: bool, **_: Any) -> str:
    said = "".join(f"<|im_start|>{m['role']}\n{m['content'] + ''}<|im_end|>\n" for m in messages)
    return said + ("<|im_start|>assistant\n" if add_generation_prompt else "")


turn = st.one_of(
    st.builds(
        lambda text: [{"role": "assistant", "content": text}, {"role": "user", "content": text + "?"}], st.text()
    ),
    st.builds(
        lambda texts: [
            calling(*(call(json.dumps({"path": text}), f"call_{i}") for i, text in enumerate(texts))),
            *(result(text, f"call_{i}") for i, text in enumerate(texts)),
        ],
        st.lists(st.text(max_size=5), min_size=1, max_size=3),
    ),
)


@given(st.lists(turn, min_size=1, max_size=10), st.booleans())
@settings(max_examples=40, derandomize=True, deadline=None)
def test_kv_15_the_prompt_of_a_turn_begins_that_of_the_next(turns, has_system):
    text = codec(chatml, takes_tools=False)
    messages = [SYSTEM, USER] if has_system else [USER]
    before = text.render(ChatPrompt(messages=messages, tools=TOOLS))
    for more in turns:
        messages = [*messages, *more]
        rendered = text.render(ChatPrompt(messages=messages, tools=TOOLS))
        assert rendered.startswith(before)
        before = rendered


def test_a_template_gets_arguments_as_it_can_print_them():
    def prints_json(messages, **_):
        return json.dumps([m["tool_calls"][0]["function"]["arguments"] for m in messages if "tool_calls" in m])

    def joins_text(messages, **_):
        return "".join("" + m["tool_calls"][0]["function"]["arguments"] for m in messages if "tool_calls" in m)

    # a template must keep what the user said
    prompt = ChatPrompt(messages=[calling(call()), result("one")], tools=TOOLS)
    assert codec(prints_json).render(prompt) == '[{"path": "a.txt"}]'
    assert codec(joins_text).render(prompt) == '{"path":"a.txt"}'


def test_an_14_a_template_of_single_calls_gets_one_a_message():
    def single(messages, **_):
        if any(len(m.get("tool_calls", [])) > 1 for m in messages):
            raise ValueError("This model only supports single tool-calls at once!")
        return "|".join(f"{m['role']}:{m['content']}" for m in messages)

    prompt = ChatPrompt(messages=[USER, calling(call(), call(identity="b"), content="Hm."), result("one")], tools=TOOLS)
    assert codec(single).render(prompt) == "user:What is in a.txt?|assistant:Hm.|assistant:|tool:one"


def test_cx_08_a_template_that_refuses_content_beside_calls_is_a_clear_refusal():
    def refuses(messages, **_):
        if any(m.get("content") and m.get("tool_calls") for m in messages):
            raise ValueError("Cannot pass both content and thinking in an assistant message with tool calls!")
        return "fine"

    with pytest.raises(PromptError, match="Cannot pass both") as refusal:
        codec(refuses).render(ChatPrompt(messages=[USER, calling(call(), content="Hm.")], tools=TOOLS))
    assert refusal.value.param == "messages"


def test_mistrals_templates_get_ids_of_nine_letters_that_pair():
    def strict(messages, **_):
        ids = [m["tool_calls"][0]["id"] for m in messages if "tool_calls" in m]
        ids += [m["tool_call_id"] for m in messages if "tool_call_id" in m]
        if any(len(identity) != 9 for identity in ids):
            raise ValueError("Tool call IDs should be alphanumeric strings with length 9!")
        return " ".join(ids)

    prompt = ChatPrompt(messages=[calling(call(identity="call_0123456789")), result("x", "call_0123456789")])
    first, second = codec(strict, tool_format="mistral").render(prompt).split()
    assert first == second == short_id("call_0123456789")
    assert short_id("abcdefghi") == "abcdefghi"


@pytest.mark.slow
def test_the_bundled_models_own_template_takes_a_whole_tool_loop():
    from backends.models.store import resolve_model

    folder = Path(resolve_model("smollm2"))
    text = TextCodec.load(folder)
    assert (text.tool_format, text.reasoning_format, text.template_takes_tools) == ("hermes", "", False)
    messages = [SYSTEM, USER, calling(call()), result("forty-two")]
    rendered = text.render(ChatPrompt(messages=messages, tools=TOOLS))
    assert rendered.count("<|im_start|>system") == 1
    assert rendered.index("Be kind.") < rendered.index("<tools>") < rendered.index("a.txt?")
    assert rendered.endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name":"look","arguments":{"path":"a.txt"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nforty-two\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
