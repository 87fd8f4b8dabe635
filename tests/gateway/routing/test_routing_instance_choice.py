"""Which of several alike instances takes a request."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.protocol.messages import ChatPrompt, Prompt, SamplingParams, TextPrompt, TokenPrompt
from gateway.core.types import CacheMode, CacheStrategy, ChatRequest, StrategySource
from gateway.routing.instance_choice import RUNNING_CHARACTERS, SESSION_CHARACTERS, Assignment, InstanceChoice
from gateway.routing.prompt_prefix import MAX_PIECES, num_characters, prefix_chain

A, B, C = ("merged-0", 10), ("merged-1", 11), ("merged-2", 12)


def request(prompt: Prompt | str, session: str | None = None, **strategy: object) -> ChatRequest:
    return ChatRequest(
        request_id="r",
        model="m",
        prompt=TextPrompt(text=prompt) if isinstance(prompt, str) else prompt,
        sampling=SamplingParams(),
        strategy=replace(CacheStrategy(CacheMode.MERGED, StrategySource.DEFAULT), **strategy),  # type: ignore[arg-type]
        stream=True,
        session=session,
    )


def chat(*texts: str, tools: list[dict[str, object]] | None = None) -> ChatPrompt:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return ChatPrompt(messages=messages, tools=tools)


def taught(choice: InstanceChoice, instance: tuple[str, int], asked: ChatRequest) -> None:
    """Let one instance have answered a request."""
    others = [choice.choose([one], request("busy")) for one in (A, B) if one != instance]
    choice.choose([instance], asked).done()
    for other in others:
        other.done()


@pytest.fixture
def choice() -> InstanceChoice:
    """One that has seen A and B, and knows nothing."""
    made = InstanceChoice()
    for instance in (A, B):
        made.choose([instance], request("")).done()
    return made


def hold(choice: InstanceChoice, instance: tuple[str, int], num_requests: int) -> list[Assignment]:
    """Running requests that have computed their prompts."""
    held = [choice.choose([instance], request(f"unlike {i}")) for i in range(num_requests)]
    for assignment in held:
        assignment.first_token()
    return held


def test_idle_instances_take_turns(choice: InstanceChoice):
    assignments = [choice.choose([A, B], request(f"text {i}")) for i in range(4)]

    assert [assignment.instance for assignment in assignments] == [A, B, A, B]
    assert {assignment.reason for assignment in assignments} == {"least loaded"}


def test_the_only_instance_that_ever_was_is_taken_without_a_look_at_the_prompt():
    assert InstanceChoice().choose([A], request("text")).reason == "only instance"


def test_a_prompt_that_waits_to_be_computed_counts_by_its_length(choice: InstanceChoice):
    long = choice.choose([A], request("x" * 5000))
    assert [choice.choose([A, B], request(f"text {i}" * 40)).instance for i in range(4)] == [B, B, B, B]
    long.first_token()
    assert choice.choose([A, B], request("text")).instance == A


def test_the_longest_known_beginning_wins(choice: InstanceChoice):
    taught(choice, A, request(chat("a" * 2000)))
    taught(choice, B, request(chat("a" * 2000, "yes", "b" * 2000)))
    chosen = choice.choose([A, B], request(chat("a" * 2000, "yes", "b" * 2000, "no", "c")))

    assert chosen.instance == B
    assert chosen.reason.startswith("prefix: 4")


def test_the_next_turn_finds_the_whole_turn_before(choice: InstanceChoice):
    first = request(chat("hello " * 300))
    taught(choice, B, first)
    chosen = choice.choose([A, B], request(chat("hello " * 300, "hi", "and?")))

    known = prefix_chain(first)[-1].num_characters
    assert (chosen.instance, chosen.reason.split(" of ")[0]) == (B, f"prefix: {known}")


@pytest.mark.parametrize(
    "other",
    [
        request("x" * 4000, cache_salt="mine"),
        request("x" * 4000, enable_prefix_cache=False),
        request(chat("x" * 4000)),
        request("y" + "x" * 3999),
    ],
    ids=["another salt", "no prefix cache", "another form", "another beginning"],
)
def test_what_can_not_meet_in_the_cache_is_no_affinity(choice: InstanceChoice, other: ChatRequest):
    taught(choice, B, request("x" * 4000))

    assert choice.choose([A, B], other).reason == "least loaded"


def test_tools_are_part_of_the_beginning(choice: InstanceChoice):
    tools = [{"type": "function", "function": {"name": "f", "description": "d" * 1000}}]
    taught(choice, B, request(chat("q", tools=tools)))

    assert choice.choose([A, B], request(chat("other", tools=tools))).instance == B
    assert choice.choose([A, B], request(chat("q"))).reason == "least loaded"


def test_imbalance_beats_affinity_once_it_is_more_than_what_affinity_saves(choice: InstanceChoice):
    asked = request("x" * 4096)
    taught(choice, B, asked)
    hold(choice, A, 1)
    hold(choice, B, 1 + 4096 // RUNNING_CHARACTERS)  # the difference is just below what B saves
    held = choice.choose([A, B], asked)
    assert held.instance == B
    hold(choice, B, 1)

    assert choice.choose([A, B], request("x" * 4096 + "y")).instance == A


def test_a_session_stays_until_the_imbalance_is_too_large(choice: InstanceChoice):
    taught(choice, B, request("first", session="s"))
    hold(choice, B, SESSION_CHARACTERS // RUNNING_CHARACTERS - 1)
    stays = choice.choose([A, B], request("second", session="s"))
    assert (stays.instance, stays.reason) == (B, "session")
    hold(choice, B, 2)

    moves = choice.choose([A, B], request("third", session="s"))
    assert (moves.instance, moves.reason) == (A, "least loaded")
    moves.done()
    assert choice.choose([A, B], request("fourth", session="s")).instance == A  # its last turn was there


def test_an_instance_that_was_started_again_knows_nothing(choice: InstanceChoice):
    taught(choice, B, request("x" * 4000, session="s"))
    again = (B[0], 99)

    assert choice.choose([A, again], request("x" * 4000, session="s")).reason == "least loaded"


def test_a_request_of_a_dead_process_burdens_nobody(choice: InstanceChoice):
    lost = choice.choose([B], request("x" * 9000))
    again = (B[0], 99)
    assert choice.choose([A, again], request("text")).instance in (A, again)
    lost.done()
    lost.done()

    assert {choice.choose([A, again], request(f"text {i}")).instance for i in range(2)} == {A, again}


def test_what_is_remembered_is_bounded_and_the_oldest_goes_first():
    choice = InstanceChoice(max_prefixes=3, max_sessions=1)
    for instance in (A, B):
        choice.choose([instance], request("")).done()
    for text, session in (("old " * 600, "old"), ("new " * 300, "new")):
        choice.choose([B], request(text, session=session)).done()

    assert choice.choose([A, B], request("new " * 300, session="new")).reason.startswith("session; prefix")
    assert choice.choose([A, B], request("old " * 600, session="old")).reason == "least loaded"


def test_a_very_long_prompt_is_compared_by_its_beginning():
    prompt = request("x" * (2 * MAX_PIECES * 512))
    assert len(prefix_chain(prompt)) == MAX_PIECES
    assert num_characters(prompt.prompt) == 2 * MAX_PIECES * 512


def test_token_ids_are_prompts_too(choice: InstanceChoice):
    taught(choice, B, request(TokenPrompt(token_ids=list(range(1000)))))

    assert choice.choose([A, B], request(TokenPrompt(token_ids=[*range(1000), 5]))).reason.startswith("prefix: 3584 of")


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["x" * 900, "x" * 1800, "z"]), st.sampled_from([None, "s", "t"]), st.booleans()),
        max_size=40,
    )
)
def test_after_all_requests_are_over_no_instance_has_any_load(
    asked: list[tuple[str, str | None, bool]],
):
    choice, open_ones = InstanceChoice(), []
    for text, session, ends in asked:
        assignment = choice.choose([A, B, C], request(text, session=session))
        assert assignment.instance in (A, B, C)
        open_ones.append(assignment)
        if ends:
            open_ones.pop(0).done()
    for assignment in open_ones:
        assignment.first_token()
        assignment.done()

    assert {load.work for load in choice._loads.values()} <= {0}
    assert {choice.choose([A, B, C], request(f"fresh {i}")).instance for i in range(3)} == {A, B, C}
