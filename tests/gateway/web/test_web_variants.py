"""Engine variants as clients see them: refusals, headers, records."""

from __future__ import annotations

import pytest
from typing_extensions import override
from web_support import local_settings, running

from gateway.core.errors import InvalidRequest, Overloaded
from gateway.core.types import CacheStrategy
from gateway.upstreams.scripted import ScriptedUpstream


class Refusing(ScriptedUpstream):
    """Has no KV dtype but its own."""

    @override
    def variant_of(self, strategy: CacheStrategy) -> str | None:
        if strategy.kv_cache_dtype != "auto":
            raise InvalidRequest("The KV cache is fp32.", param="kvCacheDtype")
        return None


@pytest.mark.parametrize("mode", ["merged", "split"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_dtype_that_nothing_has_is_refused_before_the_engine_is_asked(mode: str, stream: bool):
    engine = Refusing()
    async with running(local_settings(), engine) as gateway:
        answer = await gateway.chat(stream=stream, cacheStrategy={"mode": mode, "kvCacheDtype": "fp16"})

    assert (answer.status, answer.json()["error"]["param"]) == (400, "kvCacheDtype")
    assert engine.requests == []
    assert "X-Cache-Variant" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_the_variant_that_serves_is_named_in_header_and_record(stream: bool):
    engine = ScriptedUpstream(variants=("int8",))
    async with running(local_settings(), engine) as gateway:
        other = await gateway.chat(stream=stream, cacheStrategy={"kvCacheDtype": "int8"})
        main = await gateway.chat(stream=stream)
        records = [await gateway.record(a) for a in (other, main)]

    assert other.headers["X-Cache-Variant"] == "int8"
    assert "X-Cache-Variant" not in main.headers
    assert [record.get("cache_variant") for record in records] == ["int8", None]


async def test_a_variant_without_a_place_is_a_429_that_says_when_to_come_back():
    engine = ScriptedUpstream([Overloaded("All places are in use.", retry_after_seconds=5.0)], variants=("int8",))
    async with running(local_settings(), engine) as gateway:
        answer = await gateway.chat(stream=True, cacheStrategy={"kvCacheDtype": "int8"})

    assert (answer.status, answer.headers["Retry-After"]) == (429, "5")
