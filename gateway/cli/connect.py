"""`kvgate connect`: what points a client here, printed or merged into the client's own settings file; `--undo`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.cli.compare import whole_number
from gateway.cli.loading import load, print_problems
from gateway.clients import choosing, connecting, files
from gateway.clients.catalog import FILE_CLIENTS, NAMES, SPOKEN_CLIENTS
from gateway.clients.client import Client, Spoken
from gateway.clients.document import DocumentError
from gateway.clients.errors import ClientFileError
from gateway.clients.merging import merge, open_document
from gateway.clients.served import ask
from gateway.clients.target import DEFAULT_KEY, Target
from gateway.core.spelling import parse_mode
from gateway.settings.errors import SettingsError

SUMMARY = "point Cline, Claude Code, Codex and others here: print their settings, or write them"
KEY_VARIABLE = "KVGATE_KEY"
EXIT_BAD_OPTIONS = 2

EPILOG = """\
examples:
  kvgate connect claude                            what to put where, nothing is written
  kvgate connect cline --mode split --write        merged into Cline's own settings file
  kvgate connect cline --undo                      the file as it was before
  kvgate connect cc-switch --mode split            one-click links for CC Switch
  kvgate connect curl --mode merged

clients: cline, claude, codex, opencode, continue, gemini, cc-switch, curl

--write makes a backup beside the file (NAME.kvgate-backup) and keeps every foreign entry, comments and the file's
mode. A second --write changes nothing. --undo gives back the file as it was; if another program has changed it since,
only what kvgate wrote is taken out. A file that is malformed is named and left alone.

The key is --key, else $KVGATE_KEY, else the first of [[keys]] in the settings, else the word local. A real key is
masked in what is printed, unless --show-key is given; --write writes it in full, as the clients need it.

Model and limits come from the running gateway where it answers, else from the settings.

exit codes: 0 done, 1 a file was refused or the settings are wrong, 2 bad options
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "connect",
        help=SUMMARY,
        description=SUMMARY,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("client", metavar="CLIENT", choices=NAMES, help="one of: %(choices)s")
    add("--mode", metavar="MODE", help="merged or split, sent with every request; default: the gateway's own default")
    add("--url", help="the gateway; default: host and port of the settings")
    add("--key", help=f"the gateway's key; better in the environment as {KEY_VARIABLE}")
    add("--model", help="default: the settings' model, else the first that the gateway lists")
    add("--max-output", type=whole_number, metavar="N", help="tokens of an answer; default: a quarter of the context")
    doing = parser.add_mutually_exclusive_group()
    doing.add_argument("--write", action="store_true", help="merge it into the client's settings file")
    doing.add_argument("--undo", action="store_true", help="take it out again")
    add("--show-key", action="store_true", help="print a real key in full")
    add("--home", type=Path, metavar="DIR", help="the home folder to work in; default: $HOME")
    add("--config", metavar="FILE", help="the gateway's settings file; default as in kvgate serve")
    add("--json", action="store_true", help="the result as JSON on stdout")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    spoken = SPOKEN_CLIENTS.get(arguments.client)
    if spoken and (arguments.write or arguments.undo):
        return _refused(f"--{'write' if arguments.write else 'undo'}: {spoken.why_no_file}", EXIT_BAD_OPTIONS)
    try:
        return _undo(FILE_CLIENTS[arguments.client], arguments) if arguments.undo else _connect(arguments)
    except ClientFileError as error:
        return _refused(str(error), 1)


def _connect(arguments: argparse.Namespace) -> int:
    made = _target(arguments)
    if isinstance(made, int):
        return made
    target, notes = made
    if arguments.client in SPOKEN_CLIENTS:
        return _speak(SPOKEN_CLIENTS[arguments.client], target, notes, arguments)
    return _file_client(FILE_CLIENTS[arguments.client], target, notes, arguments)


def place(arguments: argparse.Namespace) -> tuple[Path, Mapping[str, str]]:
    """Home folder and environment. With --home, variables that move a client's files are left out of account."""
    if arguments.home is not None:
        return Path(arguments.home).expanduser().absolute(), {}
    return Path.home(), os.environ


def _target(arguments: argparse.Namespace) -> tuple[Target, list[str]] | int:
    """The target and remarks on it, or an exit code."""
    try:
        mode = parse_mode(arguments.mode) if arguments.mode else None
    except ValueError as error:
        return _refused(f"--mode {arguments.mode!r} {error}", EXIT_BAD_OPTIONS)
    loaded = load(arguments.config)
    if loaded is None:
        return 1
    try:
        url = choosing.gateway_url(arguments.url, loaded.settings)
    except SettingsError as error:
        print_problems(error)
        return EXIT_BAD_OPTIONS
    key = choosing.key_for(arguments.key, os.environ.get(KEY_VARIABLE), loaded.settings, mode).strip()
    if not key.isprintable() or " " in key:
        return _refused("--key: must be one word without blanks", EXIT_BAD_OPTIONS)
    said = choosing.Said(arguments.url, arguments.key, arguments.model, mode, arguments.max_output)
    return choosing.target_for(said, loaded.settings, url=url, key=key, served=ask(url, key))


def _file_client(client: Client, target: Target, notes: list[str], arguments: argparse.Namespace) -> int:
    home, environ = place(arguments)
    path = client.find_file(home, environ)
    notes += [*_size_notes(client, target), *_present_notes(client, target, path)]
    if arguments.write:
        return _write(client, target, notes, path, arguments)
    text = _shown(merge(client.format, "", client.entries(target)).text, target, arguments)
    if arguments.json:
        return _print_json(client, target, notes, file=str(path), text=text)
    _say(f"{client.title}: merge this into {path}, or run: {_again(client, arguments)} --write")
    print(text, end="" if text.endswith("\n") else "\n")
    _say_notes(notes + _mask_note(target, arguments))
    return 0


def _again(client: Client, arguments: argparse.Namespace) -> str:
    """This very command, for a next step that has to do the same. A key isn't repeated."""
    key = " --key KEY" if arguments.key is not None else ""
    named = _options(arguments, "mode", "url", "model", "max_output", "home", "config")
    return f"kvgate connect {client.name}{named}{key}"


def _options(arguments: argparse.Namespace, *names: str) -> str:
    """Those of them that were given, as they were, for a shell."""
    given = [(name, getattr(arguments, name)) for name in names if getattr(arguments, name) is not None]
    return "".join(f" --{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in given)


def _write(client: Client, target: Target, notes: list[str], path: Path, arguments: argparse.Namespace) -> int:
    result = connecting.write(path, client.format, client.entries(target), client.owned)
    if result.is_readable_by_others and target.key != DEFAULT_KEY:
        notes.append(f"the file holds a key and other users of this machine can read it: chmod 600 {path}")
    changed = [".".join(one) for one in result.changed]
    if arguments.json:
        backup = str(result.backup) if result.backup else None
        return _print_json(client, target, notes, file=str(path), changed=changed, backup=backup)
    if not changed:
        print(f"{client.title}: {path} has all of it already; nothing was changed")
    else:
        print(f"{client.title}: written to {path}")
        print(f"  set: {', '.join(dict.fromkeys('.'.join(one[:2]) for one in result.changed))}")
        if result.backup:
            print(f"  backup: {result.backup}")
        print(f"  undo: kvgate connect {client.name}{_options(arguments, 'home')} --undo")
        doctor = f"kvgate doctor --client {client.name}{_options(arguments, 'home', 'config')}"
        print(f"  then: {client.then}; {doctor} tries it")
    _say_notes(notes)
    return 0


def _undo(client: Client, arguments: argparse.Namespace) -> int:
    home, environ = place(arguments)
    path = client.find_file(home, environ)
    result = connecting.undo(path, client.format)
    if arguments.json:
        left = [".".join(one) for one in result.left] if result else []
        fields = {"undone": result is not None, "exact": bool(result and result.is_exact), "left": left}
        print(json.dumps({"client": client.name, "file": str(path), **fields}, indent=2))
        return 0
    if result is None:
        print(f"{client.title}: kvgate has written nothing to {path}; there is nothing to undo")
        return 0
    print(f"{client.title}: {path} {_undone(result.is_exact, result.deleted)}")
    for one in result.left:
        print(f"  kept, since it was changed by someone else: {'.'.join(one)}")
    if result.backup:
        print(f"  the backup is kept: {result.backup}")
    return 0


def _undone(is_exact: bool, deleted: bool) -> str:
    if deleted:
        return "is gone again, as before"
    if is_exact:
        return "is as it was before"
    return "was changed by another program since: only what kvgate wrote was taken out"


def _speak(spoken: Spoken, target: Target, notes: list[str], arguments: argparse.Namespace) -> int:
    lines = spoken.lines(target, arguments.show_key)
    if arguments.json:
        return _print_json(spoken, target, notes, lines=[{"title": title, "text": text} for title, text in lines])
    for title, text in lines:
        _say(f"{title}:")
        print(text)
    _say_notes(notes)
    return 0


def _size_notes(client: Client, target: Target) -> Sequence[str]:
    limits = target.limits
    if limits is None or client.first_request_tokens + limits.output <= limits.context:
        return ()
    return (
        f"{client.title}'s first request takes about {client.first_request_tokens} tokens and {target.model} holds "
        f"{limits.context}: raise max_model_len in [engine], or use a model that holds more",
    )


def _present_notes(client: Client, target: Target, path: Path) -> Sequence[str]:
    """On the settings as they are; a malformed file is no reason not to print."""
    try:
        plain = open_document(client.format, files.read(path).text).plain()
    except (DocumentError, ClientFileError) as error:
        return (f"{path}: {error}",)
    return client.remarks(target, plain)


def _shown(text: str, target: Target, arguments: argparse.Namespace) -> str:
    return text if arguments.show_key else choosing.masked(text, target.key)


def _mask_note(target: Target, arguments: argparse.Namespace) -> list[str]:
    hidden = not arguments.show_key and target.key != DEFAULT_KEY
    return ["the key is masked above; --show-key prints it, --write writes it in full"] if hidden else []


def _print_json(client: Client | Spoken, target: Target, notes: Sequence[str], **fields: Any) -> int:
    limits = {"context": target.limits.context, "output": target.limits.output} if target.limits else None
    head = {"client": client.name, "url": target.url, "model": target.model}
    rest = {"mode": str(target.mode) if target.mode else None, "limits": limits, "notes": list(notes)}
    print(json.dumps({**head, **rest, **fields}, indent=2, ensure_ascii=False))
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _say_notes(notes: Sequence[str]) -> None:
    for note in notes:
        _say(f"note: {note}")


def _refused(message: str, code: int) -> int:
    _say(f"kvgate connect: {message}")
    return code
