"""What getting a model ready says meanwhile: lines on standard error, which a parent process passes on."""

from __future__ import annotations

import sys


def say(name: str, stage: str) -> None:
    sys.stderr.write(f"kvgate: {name}: {stage}\n")
    sys.stderr.flush()
