"""What each instance is told, from the gateway's settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.config import EngineConfig
from gateway.core.types import CacheMode
from gateway.settings.schema import (
    CacheLayoutSettings,
    EngineSettings,
    KVCacheSettings,
    SchedulerSettings,
    Settings,
    TransferSettings,
)
from gateway.upstreams import engine_config as module
from gateway.upstreams.engine_config import (
    available_cores,
    instance_names,
    instance_plans,
    served_name,
    variant_cost,
    variant_plans,
)


def configs(settings: Settings | None = None, *, num_cores: int = 8, **engine: Any) -> dict[str, dict[str, Any]]:
    plans = instance_plans(settings or Settings(), EngineSettings(**engine), num_cores=num_cores)
    return {plan.role: plan.config for plan in plans}


def test_every_role_gets_what_an_engine_accepts():
    """The gateway writes plain values; here they meet the type that reads them, which refuses unknown names."""
    settings = Settings(
        kv_cache=KVCacheSettings(kv_cache_gib=2.0, num_kv_blocks=64, decode_kv_limit_gb=1.5),
        scheduler=SchedulerSettings(prefill_max_batch=3, decode_max_batch=5, merged_max_batch=7),
        transfer=TransferSettings(kv_transfer_mode="request"),
    )
    read = {
        role: msgspec.json.decode(json.dumps(config), type=EngineConfig)
        for role, config in configs(settings, max_model_len=512, weight_dtype="int8").items()
    }

    assert {role: config.max_num_seqs for role, config in read.items()} == {"merged": 7, "decode": 5, "prefill": 3}
    assert {role: config.role for role, config in read.items()} == {role: role for role in read}
    assert {config.transfer_mode for config in read.values()} == {"request"}
    assert {config.max_model_len for config in read.values()} == {512}
    assert read["decode"].kv_cache_limit_gib == 1.5
    assert read["merged"].kv_cache_limit_gib is None
    by_limit = {role: config.auto_kv_dtype_gib for role, config in read.items()}
    assert by_limit == {"merged": None, "decode": 1.5, "prefill": 1.5}  # both sides of a pair choose `auto` alike


def test_what_is_not_set_is_left_to_the_engines_defaults():
    assert "kv_cache_gib" not in configs()["merged"]
    assert "max_model_len" not in configs()["merged"]


@pytest.mark.parametrize(
    ("num_cores", "threads"),
    [
        (1, {"merged": 1, "decode": 1, "prefill": 1}),
        (2, {"merged": 2, "decode": 1, "prefill": 1}),
        (7, {"merged": 7, "decode": 4, "prefill": 3}),
    ],
)
def test_prefill_and_decode_share_the_cores_that_merged_has(num_cores: int, threads: dict[str, int]):
    assert {role: config["num_threads"] for role, config in configs(num_cores=num_cores).items()} == threads


def test_threads_that_are_set_are_kept():
    config = configs(merged_threads=3, prefill_threads=5, decode_threads=6)

    assert {role: values["num_threads"] for role, values in config.items()} == {"merged": 3, "decode": 6, "prefill": 5}


@pytest.mark.parametrize(
    ("modes", "roles"),
    [((CacheMode.MERGED,), {"merged"}), ((CacheMode.SPLIT,), {"decode", "prefill"}), ((), set())],
)
def test_only_the_instances_of_enabled_modes_run(modes: tuple[CacheMode, ...], roles: set[str]):
    assert set(configs(modes=modes)) == roles


def test_the_devices_of_the_layout_are_used_on_cuda():
    settings = Settings(cache_layout=CacheLayoutSettings(prefill_gpus=(2,), decode_gpus=(1, 3)))

    devices = {role: config["device"] for role, config in configs(settings, device="cuda").items()}
    assert devices == {"merged": "cuda:0", "decode": "cuda:1", "prefill": "cuda:2"}


def test_the_devices_of_the_layout_have_no_effect_on_the_cpu():
    settings = Settings(cache_layout=CacheLayoutSettings(prefill_gpus=(2,)))

    assert {config["device"] for config in configs(settings, device="cpu").values()} == {"cpu"}


@pytest.mark.parametrize("mode", list(CacheMode))
def test_a_variant_is_the_main_engine_of_its_mode_with_another_kv_dtype(mode: CacheMode):
    settings = Settings(kv_cache=KVCacheSettings(kv_cache_gib=0.5, kv_cache_dtype="fp32"))
    engine = EngineSettings(modes=(mode,))
    main = instance_plans(settings, engine, num_cores=4)
    plans = variant_plans(settings, engine, mode, "fp16", num_cores=4)

    assert [plan.config for plan in plans] == [{**plan.config, "kv_cache_dtype": "fp16"} for plan in main]
    assert [plan.name for plan in plans] == [f"{plan.role}[fp16]" for plan in main]


def test_the_names_of_all_instances_are_a_closed_set():
    engine = EngineSettings(modes=(CacheMode.SPLIT,), kv_cache_variants=("int8", "fp16"))

    assert instance_names(engine) == (
        "decode", "prefill", "decode[int8]", "prefill[int8]", "decode[fp16]", "prefill[fp16]"
    )  # fmt: skip
    assert instance_names(EngineSettings(modes=(CacheMode.MERGED,))) == ("merged",)


@pytest.mark.parametrize(
    ("cache", "said"),
    [({"num_kv_blocks": 7}, "7 blocks"), ({"kv_cache_gib": 0.5}, "0.5 GiB"), ({}, "1 GiB on a CPU")],
)
def test_what_a_variant_costs_is_said(cache: dict[str, Any], said: str):
    assert said in variant_cost(Settings(kv_cache=KVCacheSettings(**cache)), EngineSettings())


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ({"model": "smollm2"}, "smollm2"),
        ({"model": "/models/My-Model/"}, "My-Model"),
        ({"model": "/models/file.gguf"}, "file"),
        ({"model": "org/name"}, "name"),
        ({"model": "org/name", "served_name": "mine"}, "mine"),
        ({"model": "scripted:tokens=5,delay=0.1"}, "scripted"),
    ],
)
def test_the_model_is_served_under_its_short_name(engine: dict[str, str], name: str):
    assert served_name(EngineSettings(**engine)) == name  # type: ignore[arg-type]


@pytest.mark.parametrize(("content", "most"), [("150000 100000\n", 2), ("50000 100000\n", 1), ("max 100000\n", 10_000)])
def test_a_containers_quota_limits_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, most: int):
    (tmp_path / "cpu.max").write_text(content)
    monkeypatch.setattr(module, "CGROUP_CPU_MAX", tmp_path / "cpu.max")

    assert 1 <= available_cores() <= most
