"""KV by nixl between real processes: split answers as merged does, also after either side was killed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from backends.kv_transfer.nixl_agent import missing
from support.gateway_process import GatewayProcess, StartGateway, wait_until

NIXL = '\n[transfer]\nbackend = "nixl"\n'
PROMPT = "the cache holds keys and values of every token that a model has read so far in blocks of sixteen "


def answer(gateway: GatewayProcess, mode: str, number: int) -> str:
    """Greedy; each number is another prompt, so that nothing is found in a prefix cache."""
    body = {"model": "tiny", "prompt": f"{number} {PROMPT * 3}", "max_tokens": 12, "temperature": 0}
    status, headers, answered = gateway.call("POST", "/v1/completions", body, {"X-Cache-Mode": mode})
    assert status == 200, answered
    assert headers["x-cache-mode"] == mode
    text: str = answered["choices"][0]["text"]
    return text


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_nixl_serves_and_either_side_can_be_killed(start_gateway: StartGateway):
    with start_gateway(extra=NIXL) as gateway:
        gateway.wait_ready()
        assert answer(gateway, "split", 0) == answer(gateway, "merged", 0)

        for number, role in enumerate(("prefill", "decode"), start=1):
            killed = gateway.engine_pids()[role]
            assert listens_on_loopback_alone(killed)
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda role=role, killed=killed: gateway.engine_pids().get(role, killed) != killed, "restarted")
            gateway.wait_ready()
            assert answer(gateway, "split", number) == answer(gateway, "merged", number)
        assert not any(gateway.blocks_in_use().values())


def listens_on_loopback_alone(pid: int) -> bool:
    """UCX has no authentication."""
    if not sys.platform.startswith("linux"):
        return True
    sockets = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.exists() or link.is_symlink()}
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:  # listening
                addresses.append(fields[1].partition(":")[0])
    return bool(addresses) and set(addresses) == {"0100007F"}
