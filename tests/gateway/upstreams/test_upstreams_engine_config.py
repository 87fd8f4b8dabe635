"""What each instance is told, from the gateway's settings."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from backends.config import EngineConfig
from gateway.core.types import CacheMode
from gateway.settings.errors import SettingsError
from gateway.settings.schema import (
    CacheLayoutSettings,
    EngineSettings,
    KVCacheSettings,
    SchedulerSettings,
    Settings,
    TransferSettings,
)
from gateway.upstreams.engine.config import (
    InstancePlan,
    instance_names,
    instance_plans,
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
        transfer=TransferSettings(kv_transfer_mode="request", backend="nixl", lease_seconds=3.0),
    )
    read = {
        role: msgspec.json.decode(json.dumps(config), type=EngineConfig)
        for role, config in configs(settings, max_model_len=512, weight_dtype="int8").items()
    }

    assert {role: config.max_num_seqs for role, config in read.items()} == {"merged": 7, "decode": 5, "prefill": 3}
    assert {role: config.role for role, config in read.items()} == {role: role for role in read}
    assert {config.transfer_mode for config in read.values()} == {"request"}
    assert {(config.transfer_backend, config.lease_seconds) for config in read.values()} == {("nixl", 3.0)}
    assert {role: config.name for role, config in read.items()} == {role: role for role in read}
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


def plans(num_cores: int = 8, cpus: range | None = None, engine: dict[str, Any] | None = None, **layout: Any):
    settings = Settings(cache_layout=CacheLayoutSettings(**layout))
    made = instance_plans(settings, EngineSettings(**(engine or {})), num_cores=num_cores, cpus=cpus)
    return {plan.name: plan for plan in made}


def shares(found: dict[str, InstancePlan]) -> dict[str, Any]:
    """Cores that each is bound to, or its number of threads."""
    return {name: plan.config.get("cpus", plan.config["num_threads"]) for name, plan in found.items()}


def test_every_listed_device_has_an_instance_on_cuda():
    found = plans(prefill_gpus=(2,), decode_gpus=(1, 3), engine={"device": "cuda"})

    devices = {name: plan.config["device"] for name, plan in found.items()}
    assert devices == {"merged": "cuda:0", "decode-0": "cuda:1", "decode-1": "cuda:3", "prefill": "cuda:2"}
    assert {plan.config["name"] for plan in found.values()} == set(found)


def test_the_cores_are_divided_between_all_instances_of_split_and_between_merged_replicas():
    layout = {"merged_gpus": (0, 1, 2), "prefill_gpus": (0,), "decode_gpus": (0, 1)}
    found = plans(num_cores=8, cpus=range(10, 18), **layout)

    assert shares(found) == {
        "merged-0": (10, 11, 12), "merged-1": (13, 14, 15), "merged-2": (16, 17),
        "decode-0": (10, 11, 12), "decode-1": (13, 14, 15), "prefill": (16, 17),
    }  # fmt: skip
    for mode in (("merged",), ("decode", "prefill")):
        assert sum(plan.config["num_threads"] for plan in found.values() if plan.role in mode) == 8


def test_who_owns_all_cores_is_bound_to_none():
    assert shares(plans(num_cores=2, cpus=range(2))) == {"merged": 2, "decode": (0,), "prefill": (1,)}


def test_without_cores_to_bind_to_there_are_still_never_more_threads_than_cores():
    assert shares(plans(num_cores=3, prefill_gpus=(0, 1))) == {
        "merged": 3, "decode": 1, "prefill-0": 1, "prefill-1": 1
    }  # fmt: skip


def test_threads_that_are_set_win_and_leave_the_instances_of_their_mode_unbound():
    found = plans(num_cores=4, cpus=range(4), prefill_gpus=(0, 1), engine={"prefill_threads": 3})
    assert shares(found) == {"merged": 4, "decode": 2, "prefill-0": 3, "prefill-1": 3}
    assert shares(plans(num_cores=4, cpus=range(4), engine={"merged_threads": 2})) == {
        "merged": 2, "decode": (0, 1), "prefill": (2, 3)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "num_cores", "said"),
    [
        ({"merged_gpus": (0, 1)}, 1, "cache_layout.merged_gpus: 2 merged instances need a core each"),
        ({"prefill_gpus": (0, 1)}, 2, "cache_layout.prefill_gpus: 1 decode, 2 prefill instances"),
        ({"prefill_gpus": (0, 1), "decode_gpus": (0, 1)}, 3, "cache_layout.decode_gpus and cache_layout.prefill_gpus"),
    ],
)
def test_more_instances_than_cores_are_refused_by_the_options_name(layout: dict[str, Any], num_cores: int, said: str):
    with pytest.raises(SettingsError) as caught:
        plans(num_cores=num_cores, **layout)
    assert said in str(caught.value)
    assert f"this process may use {num_cores}" in str(caught.value)
    assert plans(num_cores=4, **layout)
    assert plans(num_cores=num_cores, engine={"device": "cuda"}, **layout)
    assert plans(num_cores=1, engine={"merged_threads": 1, "prefill_threads": 1, "decode_threads": 1}, **layout)


def test_on_a_cpu_the_devices_of_the_layout_only_say_how_many_instances_there_are():
    found = plans(prefill_gpus=(2, 7), engine={"device": "cpu"})

    assert {name: plan.config["device"] for name, plan in found.items()} == dict.fromkeys(
        ["merged", "decode", "prefill-0", "prefill-1"], "cpu"
    )


@pytest.mark.parametrize("mode", list(CacheMode))
def test_a_variant_is_the_main_engine_of_its_mode_with_another_kv_dtype(mode: CacheMode):
    settings = Settings(kv_cache=KVCacheSettings(kv_cache_gib=0.5, kv_cache_dtype="fp32"))
    engine = EngineSettings(modes=(mode,))
    main = instance_plans(settings, engine, num_cores=4)
    plans = variant_plans(settings, engine, mode, "fp16", num_cores=4)

    names = [f"{plan.role}[fp16]" for plan in main]
    assert [plan.config for plan in plans] == [
        {**plan.config, "kv_cache_dtype": "fp16", "name": name} for plan, name in zip(main, names, strict=True)
    ]
    assert [plan.name for plan in plans] == names


def test_the_names_of_all_instances_are_a_closed_set():
    engine = EngineSettings(modes=(CacheMode.SPLIT,), kv_cache_variants=("int8", "fp16"))

    assert instance_names(Settings(), engine) == (
        "decode", "prefill", "decode[int8]", "prefill[int8]", "decode[fp16]", "prefill[fp16]"
    )  # fmt: skip
    several = Settings(cache_layout=CacheLayoutSettings(merged_gpus=(0, 1)))
    assert instance_names(several, EngineSettings(modes=(CacheMode.MERGED,))) == ("merged-0", "merged-1")


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
    assert EngineSettings(**engine).public_name() == name  # type: ignore[arg-type]
