"""Whose prefix a request may find: keys with a salt share with themselves alone, whatever a client writes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from web_support import local_settings, running

from backends.core.block_pool import BlockPool
from backends.core.kv_cache_manager import KVCacheManager
from backends.core.request import Request
from backends.protocol.messages import SamplingParams, Timings, Usage
from gateway.core.types import ChatRequest, Finished, FinishReason, Started, StreamEvent, TextDelta
from gateway.settings.schema import KeySettings
from gateway.upstreams.engine.messages import generate_message
from gateway.upstreams.scripted import ScriptedUpstream

BLOCK_SIZE = 4
PROMPT = "the same words for everybody, long enough for several blocks"
NUM_FOUND = (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE  # a token is a character here


class CachingEngine:
    """A script that answers with the hits of a real prefix cache, asked as an engine's process would be."""

    def __init__(self) -> None:
        self._manager = KVCacheManager(BlockPool(1000), BLOCK_SIZE, enable_prefix_cache=True)
        self._numbers = itertools.count()

    def __call__(self, asked: ChatRequest) -> list[StreamEvent]:
        text: Any = asked.prompt.messages[-1]["content"]  # type: ignore[union-attr]
        request = Request(
            request_id=str(next(self._numbers)),
            prompt_token_ids=[ord(character) for character in text],
            max_tokens=1,
            eos_token_ids=frozenset(),
            sampling=SamplingParams(),
            cache=generate_message(asked).cache,
            seed=0,
            arrived_at=0.0,
        )
        assert self._manager.admit(request)
        request.num_computed_tokens = request.num_prompt_tokens
        self._manager.cache_full_blocks(request)
        self._manager.free(request)
        num_cached = request.num_cached_tokens or 0
        usage = Usage(prompt_tokens=request.num_prompt_tokens, completion_tokens=1, cached_tokens=num_cached)
        return [Started(usage.prompt_tokens, 1), TextDelta("x", 1), Finished(FinishReason.STOP, usage, Timings())]


def key(name: str, *, salted: bool) -> KeySettings:
    return KeySettings(key=f"sk-{name}", name=name, salt_prefix_cache=salted)  # type: ignore[arg-type]


def settings() -> Any:
    keys = (key("one", salted=True), key("two", salted=True), key("open", salted=False), key("also-open", salted=False))
    return local_settings(keys=keys)


async def found(gateway: Any, name: str, **fields: object) -> int:
    """Prompt tokens that this key's request found in the cache."""
    answer = await gateway.chat(
        messages=[{"role": "user", "content": PROMPT}], headers={"Authorization": f"Bearer sk-{name}"}, **fields
    )
    assert answer.status == 200, answer.body
    number: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return number


async def test_kv_14_a_salted_key_finds_its_own_prompts_and_nobody_else_s():
    async with running(settings(), ScriptedUpstream(CachingEngine())) as gateway:
        hits = [await found(gateway, name) for name in ("one", "one", "two", "two", "open", "one")]

    assert hits == [0, NUM_FOUND, 0, NUM_FOUND, 0, NUM_FOUND]


async def test_kv_14_keys_without_a_salt_share_as_the_manual_says():
    async with running(settings(), ScriptedUpstream(CachingEngine())) as gateway:
        hits = [await found(gateway, name) for name in ("open", "also-open")]

    assert hits == [0, NUM_FOUND]


@pytest.mark.parametrize("thief", ["two", "open"])
async def test_kv_14_a_salt_in_the_body_reaches_into_no_other_key_s_cache(thief: str):
    """Whatever it looks like: the other's name, or what the gateway makes of the other's name and salt."""
    async with running(settings(), ScriptedUpstream(CachingEngine())) as gateway:
        await found(gateway, "one")
        await found(gateway, "one", cache_salt="mine")
        guesses = ("one", "mine", "3:one:", "3:one:mine", "one:mine", ":mine", "3:one:mine\0", "\u200bone")
        hits = [await found(gateway, thief, cache_salt=guess) for guess in guesses]

    assert hits == [0] * len(guesses)


async def test_kv_14_a_salt_in_the_body_narrows_what_its_own_key_shares():
    async with running(settings(), ScriptedUpstream(CachingEngine())) as gateway:
        hits = [await found(gateway, "one", **salt) for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "a"}, {})]

    assert hits == [0, 0, NUM_FOUND, NUM_FOUND]


@pytest.mark.parametrize("salt", ["", 3, ["a"], "x" * 257])
async def test_kv_14_what_is_no_salt_is_a_400_that_names_it(salt: object):
    engine = ScriptedUpstream(CachingEngine())
    async with running(settings(), engine) as gateway:
        answer = await gateway.chat(cache_salt=salt, headers={"Authorization": "Bearer sk-one"})

    assert (answer.status, answer.error["param"]) == (400, "cache_salt")
    assert engine.requests == []
