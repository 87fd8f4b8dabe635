"""What `auto` and a limited pool mean on a machine."""

from __future__ import annotations

import pytest

from backends.config import EngineConfig
from backends.protocol.messages import Role
from backends.server.devices import device_notices, resolve_device


@pytest.mark.parametrize(
    ("role", "device", "has_cuda", "resolved"),
    [
        ("merged", "auto:0", False, "cpu"),
        ("merged", "auto:1", True, "cuda:1"),
        ("merged", "auto", True, "cuda:0"),
        ("decode", "auto:1", True, "cpu"),
        ("merged", "cpu", True, "cpu"),
        ("merged", "cuda:2", False, "cuda:2"),
    ],
)
def test_auto_is_a_device_that_exists_and_a_named_one_is_kept(role: Role, device: str, has_cuda: bool, resolved: str):
    config = EngineConfig(role=role, model="m", device=device)

    assert resolve_device(config, lambda: has_cuda).device == resolved


@pytest.mark.parametrize(
    ("size", "limit", "device", "resolved"),
    [
        (None, None, "cpu", None),
        (None, 40.0, "cpu", 1.0),
        (None, 0.5, "cpu", 0.5),
        (8.0, 4.0, "cpu", 4.0),
        (2.0, 4.0, "cuda:0", 2.0),
        (None, 40.0, "cuda:0", 40.0),
    ],
)
def test_a_pool_is_never_larger_than_its_limit(
    size: float | None, limit: float | None, device: str, resolved: float | None
):
    config = EngineConfig(role="decode", model="m", device=device, kv_cache_gib=size, kv_cache_limit_gib=limit)

    assert resolve_device(config, lambda: True).kv_cache_gib == resolved


@pytest.mark.parametrize(
    ("role", "device", "has_cuda", "said"),
    [
        ("decode", "auto:0", True, True),
        ("prefill", "auto:0", True, False),
        ("merged", "auto:0", True, False),
        ("decode", "auto:0", False, False),
        ("decode", "cpu", True, False),
    ],
)
def test_that_auto_leaves_split_on_the_cpu_is_said_once(role: Role, device: str, has_cuda: bool, said: bool):
    notices = device_notices(EngineConfig(role=role, model="m", device=device), lambda: has_cuda)

    assert bool(notices) == said
    assert all("Split runs on the CPU" in notice for notice in notices)
