"""How each engine is started to be measured, each as its users would start it on this machine. Starts nothing itself.

Every server gets all cores, the same context length and the same weights: the folder the bundled engine serves, or the
GGUF file that folder was converted from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.bench.engines.install import LLAMA, VLLM
from gateway.bench.engines.roofline import Footprint, ModelShape, weight_bytes
from gateway.bench.environments import Missing, PeerPackages, python_of, version_in
from gateway.bench.facts import num_cores

OWN_NAME = "kvgate"
MAX_MODEL_LEN = 8192
VLLM_KV_GIB = 2  # the smallest whole number that holds all of the load here
ADAPTER = Path(__file__).with_name("llama_adapter.py")
# Weights as the bundled engine alone reads them; another loader takes every *.safetensors file for the model's.
OWN_FILES = frozenset({"quantized.safetensors"})

FootprintOf = Callable[[Mapping[str, Any]], Footprint | None]


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything needed to start one server and to read its figures."""

    name: str
    command: Callable[[int], list[str]]  # of the port
    version: str
    environ: Mapping[str, str] = field(default_factory=dict)
    ready_path: str = "/health"
    max_streams: int | None = None
    weights: str = ""  # the form they are served in, in words
    footprint: FootprintOf | None = None  # from what the server says of itself, which only ours does
    note: str = ""


def launch_own(model: str, folder: Path, shape: ModelShape | None, work: Path, version: str) -> Launch:
    """This project, merged alone. KVGATE_* variables still win over the file, so an engine option can be tried."""
    settings = work / "kvgate.toml"
    settings.write_text(own_settings(model), encoding="utf-8")
    command = [sys.executable, "-m", "gateway", "serve", "--config", str(settings), "--log-level", "warning"]

    def footprint(instance: Mapping[str, Any]) -> Footprint | None:
        kv_bytes, weights = instance.get("kv_bytes_per_token"), instance.get("weight_dtype")
        if shape is None or kv_bytes is None or weights is None:
            return None
        return Footprint(weight_bytes=weight_bytes(folder, shape, weights), kv_bytes_per_token=kv_bytes)

    return Launch(
        OWN_NAME,
        lambda port: [*command, "--port", str(port)],
        version,
        ready_path="/ready",
        footprint=footprint,
    )


def own_settings(model: str) -> str:
    quoted = '"' + model.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f'[server]\nhost = "127.0.0.1"\n\n[engine]\nmodel = {quoted}\nmodes = ["merged"]\n'


def launch_vllm(environment: Path, folder: Path, shape: ModelShape | None, work: Path) -> Launch:
    view = plain_view(folder, work / "vllm-model")
    command = [str(environment / "bin" / "vllm"), "serve", str(view), "--served-model-name", "bench"]
    command += ["--host", "127.0.0.1", "--max-model-len", str(MAX_MODEL_LEN)]
    return Launch(
        "vLLM",
        lambda port: [*command, "--port", str(port)],
        version_in(environment, "vllm"),
        environ={"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GIB), "VLLM_NO_USAGE_STATS": "1"},
        weights="bf16",
        footprint=lambda _: sixteen_bit(shape, weight_bytes(folder, shape, "bf16")) if shape else None,
        note=f"KV pool {VLLM_KV_GIB} GiB",
    )


def launch_llama(environment: Path, gguf: Path, shape: ModelShape | None) -> Launch:
    command = [str(python_of(environment)), "-I", str(ADAPTER), str(gguf), "--threads", str(num_cores())]
    command += ["--max-model-len", str(MAX_MODEL_LEN)]
    return Launch(
        "llama.cpp",
        lambda port: [*command, "--port", str(port)],
        version_in(environment, "llama-cpp-python"),
        max_streams=1,
        weights=f"GGUF {gguf.name}",
        footprint=lambda _: sixteen_bit(shape, gguf.stat().st_size) if shape else None,
        note="its library behind a thin server, one request at a time",
    )


def sixteen_bit(shape: ModelShape, num_weight_bytes: float) -> Footprint:
    """Of a server that keeps keys and values in 16 bits, as both peers do unless told otherwise."""
    return Footprint(weight_bytes=num_weight_bytes, kv_bytes_per_token=shape.kv_bytes_per_token(2))


def plain_view(folder: Path, target: Path) -> Path:
    """A folder of links to the model's files without those that only the bundled engine knows."""
    target.mkdir()
    for file in folder.iterdir():
        if file.name not in OWN_FILES:
            (target / file.name).symlink_to(file.absolute())
    return target


def find_environment(given: Path | None, peer: PeerPackages, root: Path) -> Path | Missing:
    """Where the peer is installed: as told, else in the default folder."""
    folder = (given if given is not None else root / peer.folder).absolute()
    program = folder / "bin" / "vllm" if peer is VLLM else python_of(folder)
    if program.exists():
        return folder
    return Missing(peer.name, f"not found in {folder}; install it with: {how_to_install(peer)}")


def how_to_install(peer: PeerPackages) -> str:
    assert peer in {VLLM, LLAMA}
    return f"kvgate bench --install {peer.name} ({peer.size}), or give its environment with --{peer.folder}"
