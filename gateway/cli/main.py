"""The command `kvgate`: finds the sub-command and calls it. Imports only the one that was named, so help is instant."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

# Command -> its summary; each lives in the module of its name, with `add_parser(commands)` and `run(arguments) -> int`.
COMMANDS = {
    "serve": "run the gateway",
    "compare": "send the same requests in merged and in split, and show what differs",
    "bench": "measure the bundled engine and other engines on this machine, one table",
    "connect": "point Cline, Claude Code, Codex and others here: print their settings, or write them",
    "doctor": "check the gateway, or what a client is configured with, and say what to do",
    "config": "show the settings in effect, or check a settings file",
    "model": "fetch, list and locate the models of the bundled engine",
}

EXAMPLES = """\
examples:
  kvgate serve                                     the bundled model, both modes, http://127.0.0.1:8000
  kvgate serve --config disaggregated.toml         settings from a file (TOML, or an editor's settings.json)
  kvgate serve --upstream https://taotoken.net/api --upstream-key-env TAOTOKEN_API_KEY
  kvgate compare                                   merged against split, one table
  kvgate bench --quick                             this engine against others on this machine (--help: full runs)
  kvgate connect cline --mode split --write        Cline's own settings file points here; --undo
  kvgate doctor --client cline                     whether key, mode and streaming arrive
  kvgate config check kvgate.toml                  what a file means, and what is wrong with it
  kvgate model pull                                fetch and convert the bundled model

  curl -N http://127.0.0.1:8000/v1/chat/completions -H 'X-Cache-Mode: split' -H 'Content-Type: application/json' \\
    -d '{"model":"smollm2","stream":true,"messages":[{"role":"user","content":"What is a KV cache?"}]}'
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parsed = _parser(arguments).parse_args(arguments)
    if parsed.version:
        return _print_version()
    if parsed.command is None:
        _parser([]).print_help()
        return 2
    try:
        code: int = parsed.run(parsed)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has left; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Knows every command by name, and in full the one that is named."""
    parser = argparse.ArgumentParser(
        prog="kvgate",
        description="A local LLM gateway: one key, one URL, and each request chooses its KV-cache layout, "
        "merged or split.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    named = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, summary in COMMANDS.items():
        if name == named:
            command_module(name).add_parser(commands)
        else:
            commands.add_parser(name, help=summary)
    return parser


def command_module(name: str) -> ModuleType:
    return import_module(f"gateway.cli.{name}")


def _print_version() -> int:
    from importlib.metadata import version  # noqa: PLC0415  (slow, and only here)

    print(f"kvgate {version('kvgate')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
