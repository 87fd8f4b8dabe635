"""How each gateway is started over the scripted upstream: one worker, no database, a key where it takes one.

Starts nothing itself.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gateway.bench.environments import Missing, PeerPackages, version_in
from gateway.bench.gateways.install import LITELLM, PEERS, PORTKEY, SUBFOLDER, VLLM_ROUTER
from gateway.bench.gateways.sizes import MODEL
from gateway.bench.process import free_port

OWN_NAME = "kvgate"
KEY = "sk-bench"  # what the client sends
UPSTREAM_KEY = "sk-upstream"

PORTKEY_SERVER = Path("node_modules", "@portkey-ai", "gateway", "build", "start-server.js")


@dataclass(frozen=True, slots=True)
class GatewayLaunch:
    """Everything needed to start one gateway and to send it requests."""

    name: str
    command: Callable[[int], list[str]]  # of the port
    version: str
    environ: Mapping[str, str] = field(default_factory=dict)
    ready_path: str = "/health"
    headers: Mapping[str, str] = field(default_factory=lambda: {"Authorization": f"Bearer {KEY}"})
    note: str = ""


def launch_own(work: Path, upstream: str, version: str) -> GatewayLaunch:
    """This project with a client key, records and metrics. KVGATE_* variables win: options can be tried."""
    settings = work / "kvgate.toml"
    settings.write_text(own_settings(upstream), encoding="utf-8")
    command = [sys.executable, "-m", "gateway", "serve", "--config", str(settings), "--log-level", "warning"]
    return GatewayLaunch(
        OWN_NAME,
        lambda port: [*command, "--port", str(port)],
        version,
        note="client key, metrics and records on",
    )


def own_settings(upstream: str) -> str:
    return (
        f'[server]\nhost = "127.0.0.1"\napi_base = "{upstream}/v1"\napi_key = "{UPSTREAM_KEY}"\n\n'
        f'[[keys]]\nname = "bench"\nkey = "{KEY}"\n'
    )


def launch_litellm(folder: Path, work: Path, upstream: str) -> GatewayLaunch:
    config = work / "litellm.json"  # YAML, of which JSON is a part
    config.write_text(json.dumps(litellm_config(upstream)), encoding="utf-8")
    command = [str(folder / "bin" / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--num_workers", "1"]
    return GatewayLaunch(
        "LiteLLM",
        lambda port: [*command, "--telemetry", "False", "--port", str(port)],
        version_in(folder, "litellm"),
        # Its price table as shipped, no .env file of the folder this runs in, no line for each request.
        environ={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR"},
        ready_path="/health/liveliness",
        note="proxy, master key, no database, 1 worker",
    )


def litellm_config(upstream: str) -> dict[str, object]:
    params = {"model": f"openai/{MODEL}", "api_base": f"{upstream}/v1", "api_key": UPSTREAM_KEY}
    return {
        "model_list": [{"model_name": MODEL, "litellm_params": params}],
        "general_settings": {"master_key": KEY},
    }


def launch_portkey(folder: Path, upstream: str, node: str) -> GatewayLaunch:
    """It has no settings: each request says where it goes. Loopback hosts are trusted unless it is told others."""
    headers = {
        "Authorization": f"Bearer {UPSTREAM_KEY}",
        "x-portkey-provider": "openai",
        "x-portkey-custom-host": f"{upstream}/v1",
    }
    package = json.loads((folder / PORTKEY_SERVER.parents[1] / "package.json").read_text(encoding="utf-8"))
    return GatewayLaunch(
        "Portkey",
        lambda port: [node, str(folder / PORTKEY_SERVER), "--headless", f"--port={port}"],
        str(package["version"]),
        environ={"NODE_ENV": "production", "TRUSTED_CUSTOM_HOSTS": "localhost,127.0.0.1,::1"},
        ready_path="/",
        headers=headers,
        note="checks no client key",
    )


def launch_vllm_router(folder: Path, upstream: str) -> GatewayLaunch:
    command = [str(folder / "bin" / "vllm-router"), "--host", "127.0.0.1", "--worker-urls", upstream]
    command += ["--policy", "round_robin", "--log-level", "error"]
    return GatewayLaunch(
        "vllm-router",
        lambda port: [*command, "--port", str(port), "--prometheus-port", str(free_port())],
        version_in(folder, "vllm-router"),
        note="checks no client key",
    )


def find_peer(peer: PeerPackages, root: Path, work: Path, upstream: str) -> GatewayLaunch | Missing:
    """Ready to start, or the reason why it isn't."""
    folder = (root / SUBFOLDER / peer.folder).absolute()
    program = PORTKEY_SERVER if peer is PORTKEY else Path("bin", peer.folder)
    if not (folder / program).exists():
        how = f"kvgate bench gateway --install {peer.name} ({peer.size})"
        return Missing(peer.name, f"not found in {folder}; install it with: {how}")
    if peer is LITELLM:
        return launch_litellm(folder, work, upstream)
    if peer is VLLM_ROUTER:
        return launch_vllm_router(folder, upstream)
    node = shutil.which("node")
    if node is None:
        return Missing(peer.name, "it needs Node.js, which is not on PATH")
    return launch_portkey(folder, upstream, node)


def find_peers(names: tuple[str, ...], root: Path, work: Path, upstream: str) -> list[GatewayLaunch | Missing]:
    return [find_peer(peer, root, work, upstream) for name, peer in PEERS.items() if name in names]
