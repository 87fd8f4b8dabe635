"""Reasoning, text and calls, told apart while an answer is written."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.protocol.messages import ChatPrompt, GrammarSpec, SamplingParams, TextPrompt, TokenLogprob
from gateway.core.types import (
    CacheMode,
    CacheStrategy,
    ChatRequest,
    FinishReason,
    ReasoningDelta,
    StrategySource,
    TextDelta,
    ToolCallDelta,
)
from gateway.service.call_reader import call_id
from gateway.service.output_reader import OutputReader, make_output_reader

FIXED = settings(max_examples=150, derandomize=True, deadline=None)
STOP, LENGTH, TOOL_CALLS = FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS
NAMES = ("look", "go-on.now")
TOOLS = [{"type": "function", "function": {"name": name}} for name in NAMES]
FORMATS = ("hermes", "llama3", "mistral", "json")
CALL = '{"name": "look", "arguments": {"path": "a b"}}'
OTHER = '{"name":"go-on.now","parameters":{}}'


def make(
    tool_format: str = "hermes", reasoning_format: str = "", *, tools: Any = TOOLS, sampling: Any = None
) -> OutputReader:
    request = ChatRequest(
        request_id="r",
        model="m",
        prompt=ChatPrompt(messages=[{"role": "user", "content": "hi"}], tools=tools),
        sampling=sampling or SamplingParams(),
        strategy=CacheStrategy(CacheMode.MERGED, StrategySource.DEFAULT),
        stream=True,
    )
    return make_output_reader(request, tool_format=tool_format, reasoning_format=reasoning_format)


def read(pieces: list[str], *formats: str, reason: FinishReason = STOP, **options: Any) -> dict[str, Any]:
    """What a client ends up with."""
    reader = make(*formats, **options)
    deltas = [delta for piece in pieces for delta in reader.push(TextDelta(piece, 1))]
    rest, ended = reader.finish(0, reason)
    return joined([*deltas, *rest]) | {"reason": ended}


def joined(deltas: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"text": "", "reasoning": "", "calls": []}
    for delta in deltas:
        match delta:
            case TextDelta(text=text):
                found["text"] += text
            case ReasoningDelta(text=text):
                found["reasoning"] += text
            case ToolCallDelta():
                if delta.name:
                    assert delta.call == len(found["calls"]), "calls don't interleave"
                    assert delta.call_id == call_id("r", delta.index, delta.call)
                    found["calls"].append([delta.name, ""])
                assert delta.call == len(found["calls"]) - 1
                found["calls"][-1][1] += delta.arguments
    found["calls"] = [tuple(call) for call in found["calls"]]
    return found


def look(arguments: str = '{"path": "a b"}') -> tuple[str, str]:
    return "look", arguments


GO = ("go-on.now", "{}")
HERMES = f"<tool_call>\n{CALL}\n</tool_call>"


# ------------------------------------------------------------------------------------------------------ the formats


@pytest.mark.parametrize(
    ("name", "text", "calls", "said"),
    [
        ("hermes", HERMES, [look()], ""),
        ("hermes", f"I look.\n{HERMES}\n", [look()], "I look.\n"),
        ("hermes", f"{HERMES}\n<tool_call>{OTHER}</tool_call>", [look(), GO], ""),
        ("hermes", f"{HERMES} Done.", [look()], " Done."),
        ("hermes", f"<tool_call>\n{CALL}", [look()], ""),
        ("hermes", f"<tool_call>{CALL}<tool_call>{OTHER}</tool_call>", [look(), GO], ""),
        ("hermes", f"<tool_call>[{CALL}, {OTHER}]</tool_call>", [look(), GO], ""),
        ("hermes", CALL, [look()], ""),
        ("llama3", f"<|python_tag|>{CALL}", [look()], ""),
        ("llama3", OTHER, [GO], ""),
        ("llama3", f"{OTHER}; {CALL}", [GO, look()], ""),
        ("llama3", f"\n{OTHER}\n{CALL}\n", [GO, look()], ""),
        ("llama3", '<|python_tag|>look.call(path="a")', [], '<|python_tag|>look.call(path="a")'),
        ("mistral", f"[TOOL_CALLS][{CALL}]", [look()], ""),
        ("mistral", f"[TOOL_CALLS] [{CALL} , {OTHER}] ", [look(), GO], ""),
        ("mistral", '[TOOL_CALLS]look{"path": "a b"}', [look()], ""),
        ("mistral", '[TOOL_CALLS]look{"path": "a b"}[TOOL_CALLS]go-on.now{}', [look(), GO], ""),
        ("mistral", '[TOOL_CALLS]look[CALL_ID]a1B2c3D4e[ARGS]{"path": "a b"}', [look()], ""),
        ("mistral", "[TOOL_CALLS]nothing{}", [], "[TOOL_CALLS]nothing{}"),
        ("mistral", CALL, [], CALL),
        ("json", f" {CALL}\n", [look()], ""),
        ("json", f"[{CALL},{OTHER}]", [look(), GO], ""),
        ("json", f"```json\n{CALL}\n```", [look()], ""),
        ("json", f"Here: {CALL}", [], f"Here: {CALL}"),
        ("json", '{"answer": 42}', [], '{"answer": 42}'),
    ],
)
def test_each_format_is_read(name, text, calls, said):
    expected = {"text": said, "reasoning": "", "calls": calls, "reason": TOOL_CALLS if calls else STOP}
    assert read([text], name) == read(list(text), name) == expected


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('"arguments": {}', "{}"),
        ('"arguments": ""', "{}"),
        ('"arguments": "  "', "{}"),
        ('"arguments": null', "{}"),
        ('"id": "1"', "{}"),
        ('"parameters": {"a": [1.50, "é"]}', '{"a": [1.50, "é"]}'),
        ('"arguments": "{\\"a\\": 1}"', '{"a": 1}'),
        ('"arguments": {"a": "two\nlines"}', '{"a": "two\\nlines"}'),
    ],
)
def test_tc_09_tc_10_arguments_are_the_json_of_an_object(written, arguments):
    found = read([f'<tool_call>{{"name":"look",{written}}}</tool_call>'])
    assert found["calls"] == [look(arguments)]
    assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    "call",
    [
        '{"name":"look","arguments":[1]}',
        '{"name":"look","arguments":"x"}',
        '{"name":"look","arguments":7}',
        '{"name":"look","arguments":{"a":NaN}}',
        '{"name":"look","arguments":{"a":"\\u12"}}',
        '{"name":"look","arguments":{"a":' + "9" * 5000 + "}}",
        '{"name":["look"]}',
        '{"name":"unknown","arguments":{}}',
        '{"arguments":{}}',
        '{"tool":"look"}',
        "{}",
        '{"name":"look",}',
        '{"name":"look","arguments":{"a":' + "[" * 3000 + "]" * 3000 + "}}",
    ],
)
def test_what_is_no_call_of_a_known_function_is_text(call):
    for text in (f"<tool_call>{call}</tool_call>", call):
        assert read([text]) == read(list(text)) == {"text": text, "reasoning": "", "calls": [], "reason": STOP}


def test_a_wrapped_call_is_one():
    assert read([f'{{"type":"function","function":{CALL}}}'], "json")["calls"] == [look()]


def test_a_json_answer_is_not_held_back_until_its_end():
    reader = make("json")
    assert joined(reader.push(TextDelta('{"answer"', 1)))["text"] == '{"answer"'
    reader = make("hermes")
    assert joined(reader.push(TextDelta("a < b <tool", 1)))["text"] == "a < b "
    assert joined(reader.push(TextDelta("box>", 1)))["text"] == "<toolbox>"
    reader = make("hermes")
    assert joined(reader.push(TextDelta('<tool_call>{"name": "unknown"', 1)))["text"] == '<tool_call>{"name": "unknown"'


# ------------------------------------------------------------------------------------------- however the text is cut

pieces_of_text = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        [
            HERMES,
            CALL,
            OTHER,
            "<tool_call>",
            "</tool_call>",
            "<tool_",
            "<|python_tag|>",
            "[TOOL_CALLS]",
            f"[TOOL_CALLS][{CALL}]",
            '[TOOL_CALLS]look{"a":1}',
            '{"name": "look", "arguments": {"a": "\\',
            "<think>",
            "</think>",
            "\n",
            ";",
            "[",
            "]",
            ",",
            "```json\n",
            "```",
            '"',
            "{",
            "}",
        ]
    ),
)
answers = st.lists(pieces_of_text, max_size=8).map("".join)
cuts = st.lists(st.integers(0, 300), max_size=20)


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place for place in places if place < len(text))})
    return [text[start:stop] for start, stop in itertools.pairwise(edges)]


@given(answers, cuts, st.sampled_from(FORMATS), st.sampled_from(["", "think", "bracket"]))
@FIXED
def test_st_21_the_joined_deltas_do_not_depend_on_the_cuts(text, places, tool_format, reasoning_format):
    whole = read([text], tool_format, reasoning_format)
    assert read(list(text), tool_format, reasoning_format) == whole
    assert read(cut(text, places), tool_format, reasoning_format) == whole
    assert (whole["reason"] is TOOL_CALLS) == bool(whole["calls"])
    for name, arguments in whole["calls"]:
        assert name in NAMES
        assert isinstance(json.loads(arguments), dict)


@given(answers, cuts, st.sampled_from(FORMATS))
@FIXED
def test_an_answer_without_calls_is_text_as_it_was_written(text, places, tool_format):
    found = read(cut(text, places), tool_format)
    if not found["calls"]:
        assert found["text"] == text
    assert read(cut(text, places), tool_format, tools=None)["text"] == text


@given(st.text(max_size=200), st.sampled_from(FORMATS))
@FIXED
def test_tc_12_no_text_breaks_it(text, tool_format):
    read([f"<tool_call>{text}"], tool_format)
    read(list(f"[TOOL_CALLS]{text}"), tool_format)
    read(list("{" + text), tool_format)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 20_000,
        '<tool_call>{"name":"look","arguments":{"q":["a\\(", ' * 4_000,
        '<tool_call>{"name":"look","arguments":{"q":"' + "<tool_call>{" * 16_000,
        "[TOOL_CALLS]" * 16_000,
        "<tool_call>" + " " * 200_000,
        '{"' + "a" * 200_000,
        '{"name":"look","arguments":' + "[" * 200_000,
        '{"name":"look","arguments":' + "1" * 200_000,
        "\n" * 200_000,
    ],
)
def test_tc_12_malformed_markup_of_200_kb_is_text_in_linear_time(text):
    for tool_format in ("hermes", "mistral"):
        assert read([text], tool_format, "think")["text"] == text
        assert read(cut(text, list(range(0, len(text), 7))), tool_format, "think")["text"] == text
    thought = f"<think>a{text}b</think>c"
    assert read(cut(thought, list(range(0, len(text), 7))), "", "think")["reasoning"] == f"a{text}b"


# ------------------------------------------------------------------------------------------------- ends of an answer


def test_tc_01_tc_02_two_calls_have_their_own_number_and_id():
    reader = make()
    deltas = [delta for letter in HERMES * 2 for delta in reader.push(TextDelta(letter, 1))]
    assert [(delta.call, bool(delta.name)) for delta in deltas] == [(0, True), (0, False), (1, True), (1, False)]
    assert deltas[0].call_id == deltas[1].call_id != deltas[2].call_id == deltas[3].call_id
    assert reader.finish(0, STOP) == ([], TOOL_CALLS)


@pytest.mark.parametrize("reason", [STOP, LENGTH])
def test_tc_12_a_call_that_breaks_off_is_text_and_no_tool_call(reason):
    text = 'I look. <tool_call>\n{"name": "look", "arguments": {"path": "a'
    assert read(list(text), reason=reason) == {"text": text, "reasoning": "", "calls": [], "reason": reason}


def test_tc_01_a_cut_answer_stays_cut_though_a_call_was_complete():
    found = read([HERMES + '\n<tool_call>{"name":"l'], reason=LENGTH)
    assert found["calls"] == [look()]
    assert found["reason"] is LENGTH
    assert found["text"] == '\n<tool_call>{"name":"l'


def test_a_call_inside_a_broken_one_is_found():
    found = read([f'<tool_call>{{"name": "look", <tool_call>{CALL}</tool_call>'])
    assert found["calls"] == [look()]
    assert found["text"] == '<tool_call>{"name": "look", '


# --------------------------------------------------------------------------------------------------------- reasoning


@pytest.mark.parametrize(
    ("text", "reasoning", "said"),
    [
        ("<think>\nHm.\n\nWell.\n</think>\n\nYes.", "Hm.\n\nWell.", "Yes."),
        ("<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("\n<think>Hm.</think>Yes.", "Hm.", "Yes."),
        ("Yes. <think>no</think>", "", "Yes. <think>no</think>"),
        ("Yes.", "", "Yes."),
        ("<thin", "", "<thin"),
        ("", "", ""),
    ],
)
def test_reasoning_is_told_apart(text, reasoning, said):
    expected = {"text": said, "reasoning": reasoning, "calls": [], "reason": STOP}
    for tools in (TOOLS, None):
        assert read([text], "hermes", "think", tools=tools) == expected
        assert read(list(text), "hermes", "think", tools=tools) == expected


@pytest.mark.parametrize("reason", [STOP, LENGTH])
def test_st_31_an_15_reasoning_that_is_never_closed_stays_reasoning(reason):
    found = read(list("<think>\nHm, </thin"), "", "think", reason=reason)
    assert found == {"text": "", "reasoning": "Hm, </thin", "calls": [], "reason": reason}


def test_tc_07_calls_are_read_behind_reasoning_and_without_it():
    calls = f"{HERMES}\n{HERMES}"
    thought = read(list(f"<think>\nHm. <tool_call>\n</think>\n\n{calls}"), "hermes", "think")
    assert thought == {"text": "", "reasoning": "Hm. <tool_call>", "calls": [look(), look()], "reason": TOOL_CALLS}
    assert read(list(calls), "hermes", "think")["calls"] == [look(), look()]


def test_mistrals_reasoning_has_brackets():
    found = read(list('[THINK]Hm.[/THINK][TOOL_CALLS]look{"a":1}'), "mistral", "bracket")
    assert (found["reasoning"], found["calls"], found["text"]) == ("Hm.", [look('{"a":1}')], "")


# ---------------------------------------------------------------------------------------- tokens, choices, other kinds


def test_every_token_is_counted_once_and_logprobs_stay():
    reader = make("hermes", "think")
    deltas: list[Any] = []
    letters = list("<think>Hm.</think>Yes <toolbox>")
    for letter in letters:
        deltas += reader.push(TextDelta(letter, 1, 0, [TokenLogprob(letter, letter.encode(), -1.0)]))
    deltas += reader.finish(0, STOP)[0]
    texts = [delta for delta in deltas if not isinstance(delta, ToolCallDelta)]
    assert sum(delta.num_tokens for delta in texts) == len(letters)
    told = [token.text for delta in deltas if isinstance(delta, TextDelta) for token in delta.logprobs or ()]
    assert told == letters


def test_choices_are_read_each_on_its_own():
    reader = make("hermes")
    deltas: list[Any] = []
    for letter in HERMES:
        deltas += reader.push(TextDelta(letter, 1, 1))
        deltas += reader.push(TextDelta("x", 1, 0))
    assert {delta.index for delta in deltas if isinstance(delta, ToolCallDelta)} == {1}
    assert reader.finish(1, STOP)[1] is TOOL_CALLS
    assert reader.finish(0, STOP)[1] is STOP
    assert reader.finish(2, STOP) == ([], STOP)


def test_tc_06_a_forced_answer_is_calls_in_every_format():
    grammar = GrammarSpec(kind="tool_calls")
    for tool_format, reasoning_format in itertools.product(("", *FORMATS), ("", "think")):
        sampling = SamplingParams(grammar=grammar)
        text = '{"name":"look","arguments":{"path":"a"}}'
        found = read(list(text), tool_format, reasoning_format, sampling=sampling)
        assert (found["calls"], found["reason"]) == ([look('{"path":"a"}')], TOOL_CALLS)
        broken = read(list(text[:-4]), tool_format, reasoning_format, sampling=sampling, reason=LENGTH)
        assert (broken["calls"], broken["reason"]) == ([look('{"path":"')], LENGTH)


@pytest.mark.parametrize("grammar", [GrammarSpec(kind="json_object"), None])
def test_structured_answers_and_completions_are_text(grammar):
    text = f"<think>a</think>{HERMES}"
    if grammar is not None:
        assert read([text], "hermes", "think", sampling=SamplingParams(grammar=grammar))["text"] == text
        return
    request = ChatRequest(
        "r", "m", TextPrompt(text="hi"), SamplingParams(), CacheStrategy(CacheMode.MERGED, StrategySource.DEFAULT), True
    )
    reader = make_output_reader(request, tool_format="hermes", reasoning_format="think")
    assert reader.push(TextDelta(text, 3)) == [TextDelta(text, 3)]
    assert reader.push(TextDelta("", 1)) == []
