"""Answers held to a grammar in real engines of a random model, in both layouts: valid, whatever happens on the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from jsonschema import Draft202012Validator

from backends.core.errors import RequestRefused
from backends.protocol.messages import GrammarSpec, Tool
from backends.text.grammar import GrammarFailed
from support.answering import MergedAnswers, SplitAnswers, chat
from support.tiny_model import make_tiny_llama

torch.set_num_threads(1)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["dog", "cat"]},
        "ages": {"type": "array", "items": {"enum": [0, 7, 30]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}  # fmt: skip
SPEC = GrammarSpec(kind="json_schema", schema=json.dumps(SCHEMA))
TEXT = "the cache holds keys and values of every token that a model has read"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)


@pytest.fixture(scope="module", params=[MergedAnswers, SplitAnswers])
def answers(request: pytest.FixtureRequest, folder: Path) -> MergedAnswers:
    return request.param(folder)


def check(text: str) -> None:
    Draft202012Validator(SCHEMA).validate(json.loads(text))


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.5, "seed": 3},
        {"min_tokens": 90},
        {"ignore_eos": True},
        {"stop": ("{", '"', "a"), "stop_token_ids": tuple(range(3, 300))},
        {"logit_bias": {2: 100.0}, "logprobs": 2},
        {"repetition_penalty": 1.5, "presence_penalty": 2.0},
    ],
)
def test_an_answer_that_stops_is_valid_json_of_its_schema(answers, sampling):
    answer = answers.ask(TEXT, grammar=SPEC, max_tokens=200, **sampling)
    assert answer.done.finish_reason == "stop"
    assert answer.done.stop_reason is None
    check(answer.text())


def test_both_layouts_write_the_same(folder):
    texts = [
        [part.ask(TEXT, grammar=SPEC, max_tokens=200, temperature=1.0, seed=seed).text() for seed in range(5)]
        for part in (MergedAnswers(folder), SplitAnswers(folder))
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


def test_the_first_token_is_held_to_the_grammar_on_the_prefill_side(folder):
    split = SplitAnswers(folder)
    for seed in range(8):
        answer = split.ask(
            TEXT, grammar=GrammarSpec(kind="json_schema", schema='{"enum":[7]}'), seed=seed, max_tokens=1
        )
        assert (answer.text(), answer.done.finish_reason) == ("7", "stop")


def test_preempted_answers_go_on_where_they_were(folder):
    alone = MergedAnswers(folder)
    expected = [alone.ask(TEXT[i:], grammar=SPEC, max_tokens=150, temperature=1.0, seed=i).text() for i in range(5)]
    crowded = MergedAnswers(folder, num_kv_blocks=40)
    names = [crowded.submit(TEXT[i:], grammar=SPEC, max_tokens=150, temperature=1.0, seed=i) for i in range(5)]
    crowded.run()
    assert crowded.engine.stats().num_preemptions > 0
    assert [crowded.answered(name).text() for name in names] == expected


def test_answers_without_a_grammar_do_not_feel_their_neighbours(folder):
    answers = MergedAnswers(folder)
    expected = answers.ask(TEXT).tokens()
    plain = answers.submit(TEXT)
    held = answers.submit(TEXT, grammar=SPEC, max_tokens=200)
    answers.run()
    assert answers.answered(plain).tokens() == expected
    check(answers.answered(held).text())


def test_each_of_several_choices_follows_the_grammar_itself(answers):
    answer = answers.ask(TEXT, grammar=SPEC, n=3, temperature=1.2, seed=5, max_tokens=200)
    assert answer.reasons() == dict.fromkeys(range(3), "stop")
    for index in range(3):
        check(answer.text(index))


def test_an_answer_that_is_cut_off_says_so(answers):
    answer = answers.ask(TEXT, grammar=SPEC, max_tokens=4)
    assert answer.done.finish_reason == "length"
    assert answer.text()


def test_forced_calls_are_calls(answers):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {"enum": [1, 2]}}}}}]
    spec = GrammarSpec(kind="tool_calls", tools=(Tool("look", json.dumps(tools[0]["function"]["parameters"])),))
    answer = answers.ask(chat("look", tools=tools, forced_calls=1), grammar=spec, max_tokens=100)
    call = json.loads(answer.text())
    assert call["name"] == "look"
    assert call["arguments"] in ({}, {"at": 1}, {"at": 2})


def test_rv_11_a_bad_schema_fails_its_own_request_alone(answers):
    running = [answers.submit(TEXT) for _ in range(4)]
    answers.step()
    with pytest.raises(RequestRefused, match="must be an object") as refused:
        answers.submit(TEXT, grammar=GrammarSpec(kind="json_schema", schema='{"properties":{"foo":"bar"}}'))
    assert (refused.value.code, refused.value.param) == ("invalid_request", "response_format")
    answers.run()
    assert len({tuple(answers.answered(name).tokens()) for name in running}) == 1


def test_a_grammar_that_breaks_on_the_way_fails_its_own_request_alone(folder):
    answers = MergedAnswers(folder)

    class Breaking:
        def allowed(self, output_token_ids):
            return b"\xff" * 64

        def is_complete(self, output_token_ids):
            if len(output_token_ids) == 3:
                raise GrammarFailed("The grammar could not be followed any further.")
            return False

        def fresh(self):
            return self

    other = answers.submit(TEXT)
    broken = answers.submit(TEXT, grammar=SPEC)
    request = next(request for request in answers.engine._scheduler.requests() if request.request_id == broken)
    request.grammar = Breaking()
    answers.run()
    assert answers.answered(broken).failed.code == "invalid_request"
    assert answers.answered(other).done.usage.completion_tokens == 12
    assert answers.engine.stats().num_blocks_in_use == 0
