"""Real engines whose model marks calls by special tokens: they are text for a chat with tools, in both layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from backends.protocol.messages import GrammarSpec
from support.answering import MergedAnswers, SplitAnswers, chat
from support.tiny_model import make_tiny_llama

torch.set_num_threads(1)

MARK = 0  # the token id
TOOLS = [{"type": "function", "function": {"name": "look"}}]
TEMPLATE = (
    "{% if tools %}<tool_call>{% endif %}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% if thinks %}<think>\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = folder / name
        file.write_text(file.read_text().replace("<|endoftext|>", "<tool_call>"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module", params=[MergedAnswers, SplitAnswers])
def answers(request: pytest.FixtureRequest, folder: Path) -> MergedAnswers:
    return request.param(folder)


def test_special_marks_are_text_if_there_are_tools(answers):
    assert (answers.engine.info.tool_format, answers.engine.info.reasoning_format) == ("hermes", "think")
    always = {"logit_bias": {MARK: 100.0}, "max_tokens": 3}
    assert answers.ask(chat("hi", tools=TOOLS), **always).text() == "<tool_call>" * 3
    assert answers.ask(chat("hi", tools=TOOLS), n=2, **always).text(1) == "<tool_call>" * 3
    assert answers.ask(chat("hi"), **always).text() == ""
    assert answers.ask("hi", **always).text() == ""


def test_tc_07_an_answer_begins_with_the_reasoning_that_its_prompt_opened(answers):
    thinks = {"template_kwargs": {"thinks": True}}
    plain = answers.ask(chat("hi"), seed=1).text()
    assert not plain.startswith("<think>")
    opened = answers.ask(chat("hi", **thinks), logprobs=0)
    assert opened.text().startswith("<think>\n")
    assert opened.logprobs()[0].offset == len("<think>\n"), "the opening is no token of the answer"
    assert opened.done.usage.completion_tokens == len(opened.tokens())
    spec = json.dumps({"enum": [7]})
    held = answers.ask(chat("hi", **thinks), grammar=GrammarSpec(kind="json_schema", schema=spec))
    assert held.text() == "7", "a grammar says what an answer is from its first character on"
