"""What an answer that is held to a grammar can be: whatever the model likes, it is valid JSON of the schema."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from backends.protocol.messages import GrammarSpec, Tool
from backends.text.grammar import NUM_COMPILERS, AnswerGrammar, GrammarFailed, Grammars
from backends.text.grammar_source import GrammarError, grammar_source
from backends.text.tokenizer import TextCodec
from support.tiny_model import make_tokenizer

FIXED = settings(max_examples=60, derandomize=True, deadline=None)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 400, "eos_token_id": 2}))
    return TextCodec.load(Path(folder))


@pytest.fixture(scope="module")
def grammars(codec: TextCodec) -> Grammars:
    return codec.grammars()


def allowed_ids(grammar: AnswerGrammar, output: list[int]) -> list[int]:
    mask = grammar.allowed(output)
    return [token_id for token_id in range(len(mask) * 8) if mask[token_id // 8] >> token_id % 8 & 1]


def write(codec: TextCodec, grammar: AnswerGrammar, rng: random.Random, *, most: int = 4000) -> str | None:
    """A model that picks anything it may; but where it may close or end, it mostly does. None: it never ended."""
    output: list[int] = []
    closing = {
        token_id for mark in '}]",e0' for token_id in codec._tokenizer.encode(mark, add_special_tokens=False).ids
    }
    while len(output) < most:
        allowed = allowed_ids(grammar, output)
        assert allowed
        likely = [token_id for token_id in allowed if token_id in closing or token_id in codec.eos_token_ids]
        output.append(rng.choice(likely if likely and rng.random() < 0.8 else allowed))
        if output[-1] in codec.eos_token_ids or grammar.is_complete(output):
            decoder = codec.detokenizer()
            return "".join(map(decoder.push, output)) + decoder.finish()
    return None


def scalars() -> st.SearchStrategy[dict[str, Any]]:
    small = st.integers(0, 4)
    values = st.lists(st.one_of(st.integers(), st.text(max_size=4)), min_size=1, max_size=4, unique_by=repr)
    return st.one_of(
        st.sampled_from([{"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"type": "null"}]),
        st.builds(lambda low, more: {"type": "integer", "minimum": -low, "maximum": more}, small, st.integers(0, 99)),
        st.builds(lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, small, small),
        st.builds(lambda enum: {"enum": enum}, values),
        st.just({"type": "string", "pattern": "^[a-c]{1,3}[0-9]$"}),
    )


def objects(children: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from(["a", "b", "name", "äß", 'qu"ote'])
    return st.builds(
        lambda properties, num_required: {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:num_required],
            "additionalProperties": False,
        },
        st.dictionaries(names, children, max_size=4),
        st.integers(0, 4),
    )


schemas = st.recursive(
    scalars(),
    lambda children: st.one_of(
        objects(children),
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, children, st.integers(0, 3)),
        st.builds(lambda options: {"anyOf": options}, st.lists(children, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


@given(schemas, st.integers(0, 2**32))
@FIXED
def test_whatever_is_picked_an_answer_that_ends_is_valid(codec, grammars, schema, seed):
    grammar = grammars.start(GrammarSpec(kind="json_schema", schema=json.dumps(schema)))
    text = write(codec, grammar, random.Random(seed))
    if text is not None:
        Draft202012Validator(schema).validate(json.loads(text))


def test_most_answers_end(codec, grammars):
    grammar = grammars.start(GrammarSpec(kind="json_object"))
    texts = [write(codec, grammar.fresh(), random.Random(seed)) for seed in range(10)]
    assert sum(text is not None for text in texts) >= 8
    assert all(isinstance(json.loads(text), dict) for text in texts if text is not None)


@given(st.integers(0, 2**32), st.sampled_from([1, 3]))
@settings(FIXED, max_examples=20)
def test_calls_are_of_the_tools_with_arguments_of_their_schemas(codec, grammars, seed, max_calls):
    schemas = {
        "f": {"properties": {"x": {"$ref": "#/$defs/k"}}, "required": ["x"], "$defs": {"k": {"enum": [1, 2]}}},
        "größe-2": {"properties": {"on": {"type": "boolean"}}},
    }  # fmt: skip
    tools = tuple(Tool(name, json.dumps(schema)) for name, schema in schemas.items())
    grammar = grammars.start(GrammarSpec(kind="tool_calls", tools=tools, max_calls=max_calls))
    text = write(codec, grammar, random.Random(seed))
    assert text is not None
    calls = json.loads(text) if max_calls > 1 else [json.loads(text)]
    assert 1 <= len(calls) <= max_calls
    for call in calls:
        assert list(call) == ["name", "arguments"]
        Draft202012Validator(schemas[call["name"]]).validate(call["arguments"])
        assert set(call["arguments"]) <= set(schemas[call["name"]]["properties"])


BAD = {
    "a property that is no schema": {"type": "object", "properties": {"foo": "bar"}},
    "a keyword that isn't implemented": {"type": "array", "uniqueItems": True},
    "an unknown type": {"type": "robot"},
    "a reference to nowhere": {"$ref": "#/$defs/x"},
    "a reference to the net": {"$ref": "http://127.0.0.1:1/x"},
    "a pattern that is none": {"type": "string", "pattern": "("},
    "a huge step": {"type": "integer", "multipleOf": 999983},
    "a huge step with a point": {"type": "number", "multipleOf": 99.9983},
    "what can't be": {"type": "string", "minLength": 5, "maxLength": 2},
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_schema_is_refused_in_a_line_and_the_next_one_works(codec, grammars, name):
    with pytest.raises(GrammarError) as refused:
        grammars.start(GrammarSpec(kind="json_schema", schema=json.dumps(BAD[name])))
    assert refused.value.param == "response_format"
    assert 10 < len(str(refused.value)) < 400
    assert "\n" not in str(refused.value)
    assert write(codec, grammars.start(GrammarSpec(kind="json_schema", schema='{"enum":[1]}')), random.Random(1)) == "1"


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "[" * 100_000])
def test_text_that_is_no_schema_is_refused(grammars, text):
    with pytest.raises(GrammarError):
        grammars.start(GrammarSpec(kind="json_schema", schema=text))


def test_depth_and_size_have_limits():
    deep: dict[str, Any] = {}
    for _ in range(101):
        deep = {"items": deep}
    with pytest.raises(GrammarError, match="deeper than 100"):
        grammar_source(GrammarSpec(kind="json_schema", schema=json.dumps(deep)))
    with pytest.raises(GrammarError, match="65536"):
        grammar_source(GrammarSpec(kind="json_schema", schema=json.dumps({"enum": ["x" * 70_000]})))
    with pytest.raises(GrammarError) as refused:
        grammar_source(GrammarSpec(kind="tool_calls", tools=(Tool("f", json.dumps({"enum": ["x" * 70_000]})),)))
    assert refused.value.param == "tools"


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_works(codec):
    tokenizer = codec._tokenizer.to_str()
    impatient = Grammars(tokenizer, vocab_size=400, eos_token_ids=frozenset({2}), compile_seconds=0.01)
    compiled = threading.Event()
    busy = [impatient._pool.submit(compiled.wait) for _ in range(NUM_COMPILERS)]
    with pytest.raises(GrammarError, match="took longer"):
        impatient.start(GrammarSpec(kind="json_object"))
    compiled.set()
    assert all(future.result(20) for future in busy)
    patient = Grammars(tokenizer, vocab_size=400, eos_token_ids=frozenset({2}))
    assert patient.start(GrammarSpec(kind="json_object"))


def test_an_unknown_kind_of_tokenizer_refuses_every_grammar():
    with pytest.raises(GrammarError, match="can't hold answers to a grammar"):
        Grammars("{}", vocab_size=4, eos_token_ids=frozenset({2})).start(GrammarSpec(kind="json_object"))


def test_the_state_is_that_of_the_tokens_however_they_are_told(codec, grammars):
    spec = GrammarSpec(kind="json_object")
    tokens = codec._tokenizer.encode('{"a": [1, 2]', add_special_tokens=False).ids
    one_by_one, at_once = grammars.start(spec), grammars.start(spec)
    for count in range(len(tokens) + 1):
        step = one_by_one.allowed(tokens[:count])
    assert at_once.allowed(tokens) == step
    assert at_once.allowed(tokens) == step, "asking changes nothing"
    assert at_once.fresh().allowed([]) == grammars.start(spec).allowed([])


def test_an_answer_that_left_its_grammar_can_only_end_and_says_so(codec, grammars):
    grammar = grammars.start(GrammarSpec(kind="json_object"))
    wrong = codec._tokenizer.encode("no", add_special_tokens=False).ids
    assert allowed_ids(grammar, wrong) == sorted(codec.eos_token_ids)
    with pytest.raises(GrammarFailed):
        grammar.is_complete(wrong)


def test_only_an_end_follows_a_whole_object_and_ids_beyond_the_tokenizer_never_come(codec, grammars):
    grammar = grammars.start(GrammarSpec(kind="json_object"))
    tokens = codec._tokenizer.encode("{}", add_special_tokens=False).ids
    assert max(allowed_ids(grammar, [])) < codec._tokenizer.get_vocab_size()
    assert grammar.is_complete(tokens)
    assert allowed_ids(grammar, tokens) == sorted(codec.eos_token_ids)
