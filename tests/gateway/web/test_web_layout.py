"""What /health, /ready, /v1/engines and /metrics say of modes, instances and pairs."""

from __future__ import annotations

from typing import Any

import pytest
from web_support import local_settings, running

from backends.protocol.messages import EngineStats
from gateway.settings.schema import CacheLayoutSettings
from gateway.upstreams.engine.pairs import PairReport
from gateway.upstreams.engine.supervisor import InstanceReport, InstanceState
from gateway.upstreams.scripted import ScriptedUpstream

NAMES = ("prefill", "decode-0", "decode-1")


class SplitUpstream(ScriptedUpstream):
    """A double with a prefill and two decode instances, one of which is not connected."""

    async def stats(self) -> dict[str, EngineStats]:
        return {"prefill": EngineStats(num_blocks=8), "decode-0": EngineStats(num_blocks=8, transferred_tokens=5)}

    async def reset_peaks(self, *, clear_prefix_cache: bool) -> None: ...

    def ready_state(self) -> list[InstanceReport]:
        return [
            InstanceReport("decode" if name != "prefill" else "prefill", InstanceState.READY, "", 1, 0, None, name=name)
            for name in NAMES
        ]

    def pair_state(self) -> list[PairReport]:
        return [
            PairReport("prefill", "decode-0", connected=True, reason="", transfer_backend="local", same_device=True),
            PairReport("prefill", "decode-1", False, "it is starting", transfer_backend="local", same_device=None),
        ]

    def variant_state(self) -> list[Any]:
        return []

    def instance_names(self) -> tuple[str, ...]:
        return NAMES


@pytest.mark.parametrize("mode", ["merged", "split"])
async def test_pd_13_health_and_ready_say_the_default_mode_and_what_serves_each(mode: str):
    settings = local_settings(cache_layout=CacheLayoutSettings(mode=mode, merged_gpus=(0, 1)))
    async with running(settings, ScriptedUpstream()) as gateway:
        health, ready = (await gateway.get("/health")).json(), (await gateway.get("/ready")).json()

    for page in (health, ready):
        assert page["default_mode"] == mode
        assert page["modes"] == {
            "merged": "bundled engine: 2 merged",
            "split": "bundled engine: 1 prefill + 1 decode, KV by local, transfer by layer",
        }


async def test_instances_are_listed_by_name_and_pairs_with_their_state_and_way():
    async with running(local_settings(), SplitUpstream()) as gateway:
        engines, ready = (await gateway.get("/v1/engines")).json(), (await gateway.get("/ready")).json()

    local = ready["targets"]["local"]
    for page in (engines, local):
        assert [instance["name"] for instance in page["instances"]] == list(NAMES)
        assert page["pairs"] == [
            {"prefill": "prefill", "decode": "decode-0", "connected": True, "reason": "",
             "transfer_backend": "local", "same_device": True},
            {"prefill": "prefill", "decode": "decode-1", "connected": False, "reason": "it is starting",
             "transfer_backend": "local", "same_device": None},
        ]  # fmt: skip
    assert engines["engines"]["decode-0"]["transferred_tokens"] == 5


async def test_metrics_have_one_label_for_each_instance_and_each_pair_and_no_other():
    async with running(local_settings(), SplitUpstream()) as gateway:
        lines = (await gateway.get("/metrics")).body.decode().splitlines()

    up = sorted(line for line in lines if line.startswith("kvgate_engine_up{"))
    assert up == [f'kvgate_engine_up{{role="{name}"}} {value}' for name, value in
                  (("decode-0", "1.0"), ("decode-1", "0.0"), ("prefill", "1.0"))]  # fmt: skip
    pairs = sorted(line for line in lines if line.startswith("kvgate_engine_pair_up{"))
    assert pairs == [
        'kvgate_engine_pair_up{decode="decode-0",prefill="prefill"} 1.0',
        'kvgate_engine_pair_up{decode="decode-1",prefill="prefill"} 0.0',
    ]
