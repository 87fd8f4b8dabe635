"""Dockerfiles as lists of instructions. Knows as much of their syntax as ours use."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker"
DOCKERFILES = sorted(FOLDER.glob("*.Dockerfile"))


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    arguments: str


def instructions(path: Path) -> list[Instruction]:
    """In order; comments are left out and continued lines joined."""
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(kept).replace("\\\n", " ")
    return [_instruction(line.strip()) for line in joined.splitlines() if line.strip()]


def _instruction(line: str) -> Instruction:
    name, _, arguments = line.partition(" ")
    return Instruction(name, " ".join(arguments.split()))


def arguments_of(path: Path, name: str) -> list[str]:
    return [one.arguments for one in instructions(path) if one.name == name]


def command(path: Path) -> list[str]:
    """CMD as a list; only the exec form passes signals on."""
    (text,) = arguments_of(path, "CMD")
    words = json.loads(text)
    assert isinstance(words, list)
    return words


def copies(path: Path) -> dict[str, str]:
    """Source -> destination."""
    found: dict[str, str] = {}
    for text in arguments_of(path, "COPY"):
        *sources, destination = text.split()
        found |= dict.fromkeys(sources, destination)
    return found


def load_yaml(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded
