"""Tools in words, for templates that take none."""

from __future__ import annotations

import json

import pytest

from backends.protocol.messages import ChatPrompt
from backends.text.loading import ModelText
from backends.text.tokenizer import TextCodec
from backends.text.tool_prompt import tool_prompt, with_tool_prompt
from support.tiny_model import make_tokenizer

TOOLS = [{"type": "function", "function": {"name": "f", "description": "Does.", "parameters": {"type": "object"}}}]
TEXT = """You can call these functions. Each line is one, with the JSON schema of its arguments.
{"name":"f","description":"Does.","parameters":{"type":"object"}}
Answer with nothing but a call as JSON: {"name":"...","arguments":{...}}"""
MARKED = """You can call these functions. Each line between <tools> and </tools> is one, with the JSON schema of its arguments.
<tools>
{"name":"f","description":"Does.","parameters":{"type":"object"}}
</tools>
To call a function, write its name and its arguments as JSON between <tool_call> and </tool_call>:
<tool_call>
{"name":"...","arguments":{...}}
</tool_call>"""  # noqa: E501
USER = {"role": "user", "content": "hi"}


def test_the_words_are_those_that_are_documented():
    assert tool_prompt(TOOLS, 1) == TEXT
    assert tool_prompt(TOOLS, 0) == MARKED
    assert tool_prompt(TOOLS, 8).endswith('JSON array of calls: [{"name":"...","arguments":{...}}]')


def test_they_end_the_system_message_or_are_one():
    assert with_tool_prompt(ChatPrompt(messages=[USER], tools=TOOLS, forced_calls=1)).messages == [
        {"role": "system", "content": TEXT},
        USER,
    ]
    system = {"role": "system", "content": "Be kind."}
    prompt = with_tool_prompt(ChatPrompt(messages=[system, USER], tools=TOOLS, forced_calls=1))
    assert prompt.messages == [{"role": "system", "content": f"Be kind.\n\n{TEXT}"}, USER]
    assert prompt.tools is None


@pytest.mark.parametrize(("takes_tools", "refuses_system"), [(False, False), (False, True), (True, False)])
def test_the_tools_are_shown_one_way_or_the_other(tmp_path, takes_tools, refuses_system):
    from tokenizers import Tokenizer

    make_tokenizer(tmp_path)

    def apply_template(messages, *, tools, **_):
        if refuses_system and any(message["role"] == "system" for message in messages):
            raise ValueError("System role not supported")
        shown = json.dumps(tools) if tools else ""
        return shown + "".join(f"<{message['role']}>{message['content']}" for message in messages)

    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    codec = TextCodec(ModelText(tokenizer, apply_template, template_takes_tools=takes_tools))
    rendered = codec.render(ChatPrompt(messages=[USER], tools=TOOLS, forced_calls=1))
    if takes_tools:
        assert rendered == json.dumps(TOOLS) + "<user>hi"
    else:
        assert rendered == (f"<user>{TEXT}\n\nhi" if refuses_system else f"<system>{TEXT}<user>hi")
    free = codec.render(ChatPrompt(messages=[USER], tools=TOOLS))
    assert (MARKED in free) is not takes_tools
