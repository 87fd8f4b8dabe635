"""Engine variants of a real model, through the real gateway."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.gateway_process import GatewayProcess, StartGateway, is_alive, wait_until

VARIANTS = """
modes = ["merged", "split"]
kv_cache_variants = ["fp16"]
variant_idle_seconds = 3.0
"""


@pytest.fixture(scope="module")
def gateway(start_gateway: StartGateway) -> Iterator[GatewayProcess]:
    with start_gateway(engine=VARIANTS) as running:
        running.wait_ready()
        yield running


def chat(mode: str, dtype: str) -> dict[str, object]:
    return {
        "model": "tiny", "temperature": 0, "max_tokens": 8, "ignore_eos": True,
        "messages": [{"role": "user", "content": "read so far"}],
        "cacheStrategy": {"mode": mode, "kvCacheDtype": dtype},
    }  # fmt: skip


def find(gateway: GatewayProcess, name: str) -> dict[str, object]:
    variants = gateway.get("/ready")["targets"]["local"]["variants"]
    return next(variant for variant in variants if variant["name"] == name)


def up(gateway: GatewayProcess, role: str) -> bool:
    return f'kvgate_engine_up{{role="{role}"}} 1.0' in gateway.get("/metrics")


@pytest.mark.parametrize(
    ("mode", "roles"), [("merged", ["merged[fp16]"]), ("split", ["decode[fp16]", "prefill[fp16]"])]
)
def test_a_variant_is_started_for_its_first_request_and_gone_when_idle(
    gateway: GatewayProcess, mode: str, roles: list[str]
):
    wait_until(lambda: find(gateway, f"{mode}[fp16]")["state"] == "stopped", "no variant runs")
    assert not any(up(gateway, role) for role in roles)
    status, headers, body = gateway.call("POST", "/v1/chat/completions", chat(mode, "fp16"))

    assert (status, headers["x-cache-variant"], headers["x-cache-mode"]) == (200, "fp16", mode)
    assert body["usage"]["completion_tokens"] == 8
    variant = find(gateway, f"{mode}[fp16]")
    assert (variant["state"], variant["kv_cache_dtype"]) == ("ready", "fp16")
    assert set(roles) < set(gateway.engines())
    assert all(up(gateway, role) for role in roles)
    instances = variant["instances"]
    assert isinstance(instances, list)
    assert [instance["name"] for instance in instances] == roles
    wait_until(lambda: find(gateway, f"{mode}[fp16]")["state"] == "stopped", "it is stopped once it is idle")
    assert not any(is_alive(instance["pid"]) for instance in instances)
    assert gateway.call("GET", "/ready")[0] == 200


@pytest.mark.parametrize("mode", ["merged", "split"])
def test_a_dtype_that_is_neither_the_engines_nor_a_variants_is_refused_with_all_of_them(
    gateway: GatewayProcess, mode: str
):
    status, _, body = gateway.call("POST", "/v1/chat/completions", chat(mode, "bf16"))
    message = body["error"]["message"]

    assert (status, body["error"]["param"]) == (400, "kvCacheDtype")
    assert f"the KV cache of the {mode} engine is fp32" in message
    assert "Engine variants started on demand: fp16" in message
    assert gateway.call("POST", "/v1/chat/completions", chat(mode, "fp32"))[0] == 200
