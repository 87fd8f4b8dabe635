"""The comparison against this project's own HTTP edge with a scripted engine: the two agree on every shape."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web

from backends.protocol.messages import EngineInfo, EngineStats, Timings, TokenPrompt, Usage
from gateway.app import build_app, make_runner
from gateway.bench.command import EXIT_CLEAN, EXIT_FAILED_REQUESTS, execute
from gateway.bench.options import CompareOptions, Job
from gateway.cli.progress import ProgressBar
from gateway.core.errors import UpstreamGone
from gateway.core.types import CacheMode, Finished, FinishReason, Started, TextDelta
from gateway.settings.schema import EngineSettings, KeySettings, Settings
from gateway.upstreams.engine.supervisor import InstanceReport, InstanceState
from gateway.upstreams.scripted import ScriptedUpstream

ROLES = ("merged", "prefill", "decode")
THREADS = {"merged": 2, "prefill": 1, "decode": 1}
TIMINGS = Timings(prefill_seconds=0.5, transfer_seconds=0.2, transfer_overlapped_seconds=0.1, transfer_bytes=2**20)
OPTIONS = CompareOptions(num_requests=3, num_rounds=1, prompt_tokens=40, output_tokens=4, concurrency=2)


def info(role):
    return EngineInfo(
        role=role, pid=1, served_name="scripted", model_path="/m", model_fingerprint="f", max_model_len=8192,
        vocab_size=512, block_size=16, num_blocks=64, kv_cache_dtype="fp32", kv_bytes_per_token=8,
        weight_dtype="fp32", device="cpu", num_threads=THREADS[role],
    )  # fmt: skip


class ScriptedEngine(ScriptedUpstream):
    """A scripted upstream that also has the figures of engine processes."""

    def __init__(self, script):
        super().__init__(script)
        self.resets: list[bool] = []

    async def stats(self):
        return {role: EngineStats(peak_memory_bytes=2**20, peak_blocks_in_use=5, num_blocks=64) for role in ROLES}

    async def reset_peaks(self, *, clear_prefix_cache=False):
        self.resets.append(clear_prefix_cache)
        return await self.stats()

    def ready_state(self):
        return [InstanceReport(role, InstanceState.READY, "", 1, 0, info(role)) for role in ROLES]


def answer(request):
    """Four tokens in three pieces of text."""
    assert isinstance(request.prompt, TokenPrompt)
    num_prompt = len(request.prompt.token_ids)
    usage = Usage(prompt_tokens=num_prompt, completion_tokens=request.sampling.max_tokens, cached_tokens=10)
    timings = TIMINGS if request.strategy.mode is CacheMode.SPLIT else Timings(prefill_seconds=0.25)
    pieces = [TextDelta("a", 1), TextDelta("b", 1), TextDelta("cd", 2)]
    return [Started(num_prompt, 4), *pieces, Finished(FinishReason.LENGTH, usage, timings)]


@asynccontextmanager
async def real_gateway(engine) -> AsyncIterator[str]:
    settings = Settings(
        engine=EngineSettings(served_name="scripted"),
        keys=(KeySettings.model_validate({"key": "sk-1", "name": "one"}),),
    )
    runner = make_runner(build_app(settings, engine=engine))
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def compared(engine, **targets):
    stdout, stderr = io.StringIO(), io.StringIO()
    async with real_gateway(engine) as url:
        job = Job(OPTIONS, url, "sk-1", **targets)
        code = await execute(job, ProgressBar(stderr), stdout=stdout, stderr=stderr)
    return code, stdout.getvalue(), stderr.getvalue()


async def test_everything_the_gateway_says_reaches_the_result():
    engine = ScriptedEngine(answer)

    code, stdout, stderr = await compared(engine, json_target="-")

    assert (code, stderr) == (EXIT_CLEAN, "")
    document = msgspec.json.decode(stdout)
    merged, split = document["summary"]["modes"]
    assert document["comparison"]["notices"] == []
    assert document["comparison"]["model"]["id"] == "scripted"
    assert {role: entry["num_threads"] for role, entry in document["comparison"]["processes"].items()} == THREADS
    assert (merged["num_ok"], split["num_ok"]) == (3, 3)
    assert (merged["breakdown"]["prefill_seconds"], split["breakdown"]["prefill_seconds"]) == (0.25, 0.5)
    assert split["transfers"] == {"num_bytes": 3 * 2**20, "seconds": 0.2 * 3, "overlapped_share": 0.5}
    assert (split["prefix_hit_rate"], split["peak_memory_bytes"]) == (0.25, 2**21)
    assert document["summary"]["texts"]["num_equal"] == 3


async def test_prompts_arrive_as_token_ids_within_the_vocabulary_of_the_engine():
    engine = ScriptedEngine(answer)
    await compared(engine)

    prompts = [request.prompt.token_ids for request in engine.requests]
    assert {len(prompt) for prompt in prompts} == {40}
    assert all(256 <= token_id < 512 for prompt in prompts for token_id in prompt)
    assert all(request.sampling.ignore_eos and request.sampling.temperature == 0 for request in engine.requests)
    assert engine.resets == [True, True] * 2


async def test_the_table_says_that_resources_are_equal():
    _, stdout, _ = await compared(ScriptedEngine(answer))

    assert "threads equal: merged 2 on cpu, split 1+1 on cpu" in stdout
    assert "texts: 3 of 3 equal" in stdout
    assert "note: peak memory is resident memory" in stdout


async def test_an_engine_that_dies_in_the_middle_is_an_error_of_that_request():
    engine = ScriptedEngine(None)

    def script(request):
        # The 1st request is the warm-up of merged, the 3rd is measured.
        return [*answer(request)[:2], UpstreamGone("the engine died")] if len(engine.requests) == 3 else answer(request)

    engine.script = script
    code, stdout, _ = await compared(engine)

    assert code == EXIT_FAILED_REQUESTS
    assert "failed in merged, 1 x: error event: the engine died" in stdout
