"""How a model's marks are found, and that they are seen in its answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import byte_level, metaspace
from tokenizers import AddedToken, Tokenizer

from backends.protocol.messages import ChatPrompt
from backends.text.formats import opens_reasoning, reasoning_format, tool_format
from backends.text.tokenizer import TextCodec

USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
# What tells a family, of its template; the rest of it is left out.
QWEN3 = (
    "{% if tools %}<tools>{{ tools }}</tools><tool_call>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
DEEPSEEK = (
    "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|><think>\n{% endif %}"
)
LLAMA_32 = (
    """{% for t in tools %}Respond in the format {"name": function name, "parameters": dictionary of argument name """
    """and its value}. {{ t }}{% endfor %}{{ messages[0].content }}<|eot_id|>"""
)


@pytest.mark.parametrize(
    ("template", "takes_tools", "calls", "reasoning"),
    [
        (QWEN3, True, "hermes", "think"),
        (DEEPSEEK, False, "hermes", "think"),
        (LLAMA_32, True, "llama3", ""),
        ("{% if builtin_tools %}<|python_tag|>{% endif %}{{ tools }}", True, "llama3", ""),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]", True, "mistral", ""),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS][THINK]", True, "mistral", "bracket"),
        ("{{ tools }}<tool_call>\n<function={{ name }}>", True, "", ""),
        ("{{ tools }}", True, "json", ""),
        ("{{ messages }}", False, "hermes", ""),
    ],
)
def test_a_template_says_how_calls_and_reasoning_are_marked(template, takes_tools, calls, reasoning):
    assert tool_format([template], takes_tools=takes_tools) == calls
    assert reasoning_format([template]) == reasoning


def test_a_model_without_a_template_has_no_calls():
    assert tool_format([], takes_tools=False) == ""
    assert reasoning_format([]) == ""


def with_specials(tokenizer: Tokenizer, *marks: str) -> Tokenizer:
    changed = Tokenizer.from_str(tokenizer.to_str())
    changed.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return changed


def load(folder: Path, tokenizer: Tokenizer, template: str) -> TextCodec:
    tokenizer.save(str(folder / "tokenizer.json"))
    declared = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(declared))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 600}))
    return TextCodec.load(folder)


def decode(codec: TextCodec, token_ids: list[int], **options: Any) -> str:
    decoder = codec.detokenizer(**options)
    return "".join(decoder.push(token_id) for token_id in token_ids) + decoder.finish()


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_special_marks_are_text_where_they_are_to_be_read_and_nowhere_else(tmp_path, make):
    marks = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<other>")
    tokenizer = with_specials(make(), *marks)
    codec = load(tmp_path, tokenizer, QWEN3)
    text = "<think>the end</think>stop<tool_call>{}</tool_call><other>"
    ids = [token_id for token_id in tokenizer.encode(text, add_special_tokens=False).ids if token_id is not None]

    read = decode(codec, ids, marks=codec.marks(with_tools=True)).replace(" ", "")
    assert read == "<think>theend</think>stop<tool_call>{}</tool_call>"
    without_tools = decode(codec, ids, marks=codec.marks(with_tools=False)).replace(" ", "")
    assert without_tools == "<think>theend</think>stop{}"
    assert decode(codec, ids).replace(" ", "") == "theendstop{}"


def opening_of(codec: TextCodec, *messages: dict[str, Any], **options: Any) -> str:
    prompt = ChatPrompt(messages=list(messages), **options)
    return codec.opening(prompt, codec.encode_prompt(prompt))


def test_tc_07_whether_the_prompt_opened_the_reasoning_is_seen_in_it(tmp_path):
    (tmp_path / "r1").mkdir()
    r1 = load(tmp_path / "r1", byte_level(), DEEPSEEK)
    assert opening_of(r1, USER) == "<think>\n"
    assert opening_of(r1, USER, continue_final_message=False) == "<think>\n"

    qwen = load(tmp_path, byte_level(), QWEN3)
    assert opening_of(qwen, USER) == ""
    assert opening_of(qwen, USER, template_kwargs={"enable_thinking": False}) == ""
    assert opening_of(qwen, {"role": "user", "content": "What does <think>"}) == ""


def test_a_continued_answer_is_in_the_reasoning_that_it_left_open(tmp_path):
    codec = load(tmp_path, byte_level(), QWEN3)
    for said, opening in (("<think>the", "<think>\n"), ("<think>a</think>the", ""), ("the", "")):
        final = {"role": "assistant", "content": said}
        assert opening_of(codec, USER, final, continue_final_message=True) == opening
    assert opens_reasoning("[THINK]a", "bracket")


def test_the_opening_comes_first_and_counts_as_text(tmp_path):
    codec = load(tmp_path, byte_level(), DEEPSEEK)
    decoder = codec.detokenizer(["<think>"], opening="<think>\n")
    assert decoder.num_characters == len("<think>\n")
    ids = byte_level().encode("the end").ids
    assert "".join(map(decoder.push, ids)) + decoder.finish() == "<think>\nthe end"
    assert codec.detokenizer(opening="<think>\n").finish() == "<think>\n"
