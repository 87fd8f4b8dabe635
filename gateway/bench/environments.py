"""Virtual environments of other programs, for `kvgate bench` to start. Standard library alone; knows none by name.

Nothing of them enters this project's environment, and versions are pinned, since a figure belongs to a version.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DEFAULT_FOLDER = Path(".peers")
MARKER = "kvgate-peer.txt"  # written last: the folder beside it holds exactly what it lists

Command = Callable[[Sequence[str]], None]  # raises on failure
Finish = Callable[[Path, Sequence[str], Command], None]  # folder, its pip, how to run a command


class InstallError(Exception):
    """The peer can't be installed; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A peer that isn't on this machine."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerPackages:
    """What goes into one environment, and the distribution whose version stands in reports."""

    name: str
    folder: str
    requirements: tuple[str, ...]
    size: str
    only_wheels: bool = False


Install = Callable[[PeerPackages, Path, Command], Path]


def run_command(command: Sequence[str]) -> None:
    """Run it with its output on standard error: standard output is for results."""
    try:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    except (subprocess.CalledProcessError, OSError) as error:
        raise InstallError(f"{' '.join(command)} failed: {error}") from error


def install_environment(
    peer: PeerPackages, root: Path, command: Command = run_command, finish: Finish | None = None
) -> Path:
    """The peer's environment in `root`, made unless it is there already with the same versions."""
    folder = root.absolute() / peer.folder
    if is_installed(peer, folder):
        return folder
    make_room(folder, "pyvenv.cfg", "a virtual environment")
    command([sys.executable, "-m", "venv", str(folder)])
    wheels = ["--only-binary=:all:"] if peer.only_wheels else []
    pip = [str(python_of(folder)), "-m", "pip", "--disable-pip-version-check"]
    command([*pip, "install", "-qq", *wheels, *peer.requirements])
    if finish is not None:
        finish(folder, pip, command)
    mark_installed(peer, folder)
    return folder


def install_each(
    peers: Mapping[str, PeerPackages], names: Sequence[str], root: Path, install: Install, command: Command
) -> int:
    """Each named peer; one that fails doesn't keep the next from being tried. 1: one failed."""
    failed = 0
    for name in names:
        peer = peers[name]
        sys.stderr.write(f"kvgate bench: {name}: {', '.join(peer.requirements)} ({peer.size})\n")
        try:
            folder = install(peer, root, command)
        except InstallError as error:
            sys.stderr.write(f"kvgate bench: {name}: {error}\n")
            failed += 1
        else:
            sys.stderr.write(f"kvgate bench: {name}: ready in {folder}\n")
    return 1 if failed else 0


def is_installed(peer: PeerPackages, folder: Path) -> bool:
    try:
        return (folder / MARKER).read_text(encoding="utf-8") == _marker(peer)
    except OSError:
        return False


def mark_installed(peer: PeerPackages, folder: Path) -> None:
    (folder / MARKER).write_text(_marker(peer), encoding="utf-8")


def make_room(folder: Path, sign: str, what: str) -> None:
    """Remove what an interrupted or older installation left, known by its file `sign`, and nothing else."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / sign).is_file():
        raise InstallError(f"{folder} isn't {what}; it is left alone. Choose another with --install-to")
    shutil.rmtree(folder)


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def site_packages(folder: Path) -> Path:
    found = next(iter(sorted(folder.glob("lib/python*/site-packages"))), None)
    if found is None:
        raise InstallError(f"{folder} has no site-packages: it isn't a virtual environment")
    return found


def version_in(environment: Path, distribution: str) -> str:
    """As its own Python tells it."""
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    command = [str(python_of(environment)), "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    return answer.stdout.strip() or "unknown"


def _marker(peer: PeerPackages) -> str:
    return "\n".join(peer.requirements) + "\n"
