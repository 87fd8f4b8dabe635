"""`kvgate config`: what the settings in effect are, and whether a file is right. Secrets are shown as `***`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.cli.loading import load
from gateway.settings.importers import LoadedSettings
from gateway.settings.schema import public_dump

SUMMARY = "show the settings in effect, or check a settings file"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("config", help=SUMMARY, description=SUMMARY)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    show = verbs.add_parser("show", help="every option in effect (file, KVGATE_* and defaults), keys hidden")
    show.add_argument("--config", metavar="FILE", help="settings file; default as in kvgate serve")
    show.add_argument("--json", action="store_true", help="as JSON, with the notices")
    show.set_defaults(run=run_show)
    check = verbs.add_parser("check", help="say what is wrong with a file, or what is worth knowing about it")
    check.add_argument("file", metavar="FILE")
    check.set_defaults(run=run_check)


def run_show(arguments: argparse.Namespace) -> int:
    loaded = load(arguments.config)
    if loaded is None:
        return 1
    if arguments.json:
        print(json.dumps(_as_json(loaded), indent=2, ensure_ascii=False))
        return 0
    print("\n".join(toml_lines(_in_effect(loaded))))
    _print_notices(loaded)
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    loaded = load(arguments.file)
    if loaded is None:
        return 1
    _print_notices(loaded)
    print(f"{arguments.file}: good ({loaded.shape}); default mode: {loaded.settings.cache_layout.mode}")
    return 0


def toml_lines(dump: Mapping[str, Any]) -> Iterator[str]:
    """The native file that means the same. An option that isn't set is a comment."""
    for table, value in dump.items():
        if isinstance(value, list):
            for row in value:
                yield from _table_lines(f"[[{table}]]", row)
        elif value is None:
            yield f"# [{table}] is not set: it does not run\n"
        else:
            yield from _table_lines(f"[{table}]", value)


def _table_lines(header: str, table: Mapping[str, Any]) -> Iterator[str]:
    yield header
    for key, value in table.items():
        yield f"# {key} is not set" if value is None else f"{key} = {_value(value)}"
    yield ""


def _value(value: Any) -> str:
    """JSON's strings, numbers, switches and lists of them are TOML's as well."""
    if not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    inner = ", ".join(f"{json.dumps(key)} = {_value(item)}" for key, item in value.items())
    return f"{{ {inner} }}" if inner else "{}"


def _in_effect(loaded: LoadedSettings) -> dict[str, Any]:
    """With the bundled engine's defaults where it runs without being mentioned."""
    settings = loaded.settings
    return public_dump(settings.model_copy(update={"engine": settings.engine or settings.effective_engine()}))


def _as_json(loaded: LoadedSettings) -> dict[str, Any]:
    return {
        "file": None if loaded.path is None else str(loaded.path),
        "shape": loaded.shape,
        "settings": _in_effect(loaded),
        "notices": list(loaded.notices),
    }


def _print_notices(loaded: LoadedSettings) -> None:
    for notice in loaded.notices:
        print(f"notice: {notice}", file=sys.stderr)
