"""Which conversation a request belongs to: by what its client says, else by how the conversation began."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.protocol.messages import ChatPrompt, TextPrompt, TokenPrompt
from gateway.service.session import session_of

SYSTEM = {"role": "system", "content": "You are terse."}
FIRST = {"role": "user", "content": "Fix the bug."}


def chat(*messages, headers=None, **fields):
    return session_of(headers or {}, fields, ChatPrompt(messages=list(messages)))


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"X-Claude-Code-Session-Id": "s1"}, {}),
        ({"session_id": "s1"}, {}),
        ({"x-session-affinity": "s1"}, {}),
        ({"X-Session-Id": " s1 "}, {}),
        ({}, {"prompt_cache_key": "s1"}),
        ({}, {"session_id": "s1"}),
        ({}, {"metadata": {"user_id": "s1"}}),
    ],
)
def test_what_the_client_says_is_the_session_whatever_the_messages_are(headers, fields):
    said = chat(SYSTEM, FIRST, headers=headers, **fields)
    assert said == chat({"role": "user", "content": "Else."}, headers={"x-session-id": "s1"})
    assert said != chat(SYSTEM, FIRST)


def test_a_conversation_s_own_id_is_narrower_than_its_user_s():
    both = chat(FIRST, headers={"x-claude-code-session-id": "s1"}, metadata={"user_id": "u"})
    assert both == chat(FIRST, headers={"x-claude-code-session-id": "s1"})


@pytest.mark.parametrize("fields", [{"prompt_cache_key": ""}, {"session_id": 5}, {"metadata": "x"}, {"metadata": None}])
def test_an_id_that_says_nothing_counts_as_none(fields):
    assert chat(SYSTEM, FIRST, **fields) == chat(SYSTEM, FIRST)


def test_other_systems_and_other_first_messages_are_other_sessions():
    others = [chat(FIRST), chat(SYSTEM, FIRST), chat(SYSTEM, {"role": "user", "content": "Else."})]
    assert len(set(others)) == 3


def test_texts_have_a_session_by_their_beginning_and_tokens_none():
    assert session_of({}, {}, TextPrompt(text="a")) != session_of({}, {}, TextPrompt(text="b"))
    assert session_of({}, {}, TokenPrompt(token_ids=[1])) is None
    assert chat({"role": "assistant", "content": "x"}) is None


TURN = st.fixed_dictionaries({"role": st.sampled_from(["assistant", "user", "tool", "system"]), "content": st.text()})


@given(st.text(), st.text(), st.lists(TURN, max_size=6), st.integers(0, 6))
@settings(max_examples=80, derandomize=True, deadline=None)
def test_the_session_stays_while_the_conversation_grows(system, first, turns, cut):
    opening = [{"role": "system", "content": system}, {"role": "user", "content": first}]
    assert chat(*opening) == chat(*opening, *turns[:cut]) == chat(*opening, *turns)


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.none()), st.text(min_size=1))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_any_headers_and_fields_give_a_digest_that_shows_nothing(headers, said):
    session = session_of({k: v for k, v in headers.items() if isinstance(v, str)}, headers, TextPrompt(text=said))
    assert session is not None
    assert len(session) == 32
    assert int(session, 16) >= 0
