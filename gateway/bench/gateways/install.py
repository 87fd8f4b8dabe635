"""Which other gateways `kvgate bench gateway` compares with, and how they are installed. Standard library alone.

Each goes into a folder of its own. Python ones by pip, one from npm.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from gateway.bench.environments import (
    Command,
    InstallError,
    PeerPackages,
    install_each,
    install_environment,
    is_installed,
    make_room,
    mark_installed,
    run_command,
)

SUBFOLDER = "gateways"  # of the folder where peers are installed

LITELLM = PeerPackages("litellm", "litellm", ("litellm[proxy]==1.108.7",), "760 MB")
VLLM_ROUTER = PeerPackages("vllm-router", "vllm-router", ("vllm-router==0.1.17",), "130 MB", only_wheels=True)
# Portkey allows any later release of the two libraries it serves HTTP with, but its streams answer 500 with those.
PORTKEY = PeerPackages(
    "portkey",
    "portkey",
    ("@portkey-ai/gateway@1.15.2", "@hono/node-server@1.13.8", "@hono/node-ws@1.2.0"),
    "25 MB",
)
PEERS: dict[str, PeerPackages] = {peer.name: peer for peer in (LITELLM, PORTKEY, VLLM_ROUTER)}


def install_peer(peer: PeerPackages, root: Path, command: Command = run_command) -> Path:
    """The peer in its folder in `root`, unless it is there already with the same versions."""
    if peer is not PORTKEY:
        return install_environment(peer, root, command)
    folder = root.absolute() / peer.folder
    if not is_installed(peer, folder):
        _install_by_npm(peer, folder, command)
    return folder


def _install_by_npm(peer: PeerPackages, folder: Path, command: Command) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise InstallError("it needs Node.js 18 or newer with npm, which is not on PATH")
    make_room(folder, "package.json", "an npm project")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text(package_json(peer), encoding="utf-8")
    command([npm, "install", "--prefix", str(folder), "--omit=dev", "--no-audit", "--no-fund", "--loglevel", "error"])
    mark_installed(peer, folder)


def package_json(peer: PeerPackages) -> str:
    """The first requirement, and the exact versions that its own dependencies must have."""
    names = [requirement.rpartition("@") for requirement in peer.requirements]
    (name, _, version), *pinned = names
    document = {
        "private": True,
        "dependencies": {name: version},
        "overrides": {other: pin for other, _, pin in pinned},
    }
    return json.dumps(document, indent=2) + "\n"


def install_all(names: Sequence[str], root: Path, command: Command = run_command) -> int:
    """Each named gateway, in `root`/gateways. 1: one failed."""
    return install_each(PEERS, names, root / SUBFOLDER, install_peer, command)
