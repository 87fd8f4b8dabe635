"""`kvgate model`: hands over to the engine's own command in a process of its own; nothing of it is imported here."""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.util import find_spec

SUMMARY = "fetch, list and locate the models of the bundled engine"
COMMAND = ("-m", "backends.models.cli")
NEEDED = ("torch", "transformers", "safetensors", "gguf")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    # No character begins an option here: all of them belong to the engine's command, --help too.
    parser = commands.add_parser("model", help=SUMMARY, add_help=False, prefix_chars="\0")
    parser.add_argument("rest", nargs="*", metavar="pull|list|path|packed ...")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(
            f"kvgate: the bundled engine is not installed (missing: {', '.join(missing)}). "
            "Install it with: pip install 'kvgate[engine]'",
            file=sys.stderr,
        )
        return 1
    return subprocess.call([sys.executable, *COMMAND, *arguments.rest])
