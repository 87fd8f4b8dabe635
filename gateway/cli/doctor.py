"""`kvgate doctor`: what is wrong with the gateway, or on the way from a client to it, and what to do."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gateway.cli.compare import seconds_number
from gateway.cli.connect import EXIT_BAD_OPTIONS, KEY_VARIABLE, place
from gateway.clients import choosing, files
from gateway.clients.catalog import FILE_CLIENTS, NAMES
from gateway.clients.client import Client
from gateway.clients.connection import Connection
from gateway.clients.document import DocumentError
from gateway.clients.errors import ClientFileError
from gateway.clients.merging import open_document
from gateway.core.spelling import parse_mode
from gateway.core.types import CacheMode
from gateway.doctor.client_checks import check_file
from gateway.doctor.examination import (
    Patient,
    examine_client,
    examine_gateway,
    examine_routes,
    new_session,
)
from gateway.doctor.finding import Finding, Level, problem, warning
from gateway.settings.errors import SettingsError
from gateway.settings.importers import find_settings_file, load_settings
from gateway.settings.schema import Settings

SUMMARY = "check the gateway, or what a client is configured with, and say what to do"

EPILOG = """\
examples:
  kvgate doctor                                    the gateway: reachable, ready, both modes, advice on its settings
  kvgate doctor --mode split                       as before, with one request in split alone
  kvgate doctor --client claude                    reads Claude Code's settings, sends what Claude Code sends
  kvgate doctor --client codex --mode split        and says whether split arrives
  kvgate doctor --client cc-switch --mode split    every address that its import links carry
  kvgate doctor --json

Of a client it reads the real settings file, sends requests with the same path, headers, size and number of tools, and
says whether key, mode and streaming survive. Nothing is sent to a server that is not kvgate.

exit codes: 0 no problem (warnings may be), 1 a problem, 2 bad options
"""


@dataclass(frozen=True, slots=True)
class Order:
    """What to examine."""

    client: str | None
    settings: Settings
    url: str
    key: str
    mode: CacheMode | None
    url_was_named: bool
    timeout_seconds: float


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help=SUMMARY,
        description=SUMMARY,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--client", metavar="NAME", choices=NAMES, help="examine this client's way: one of %(choices)s")
    add("--mode", metavar="MODE", help="merged or split: the mode that has to arrive; default: what is configured")
    add("--url", help="the gateway; default: host and port of the settings, or what the client has")
    add("--key", help=f"the gateway's key; better in the environment as {KEY_VARIABLE}. Never printed")
    add(
        "--timeout", type=seconds_number, default=300.0, metavar="SECONDS", help="of one request (default: %(default)g)"
    )
    add("--home", type=Path, metavar="DIR", help="the home folder to look in; default: $HOME")
    add("--config", metavar="FILE", help="the gateway's settings file; default as in kvgate serve")
    add("--json", action="store_true", help="the findings as JSON on stdout")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        mode = parse_mode(arguments.mode) if arguments.mode else None
    except ValueError as error:
        return _refused(f"--mode {arguments.mode!r} {error}")
    settings, found = read_settings(arguments.config)
    try:
        url = choosing.gateway_url(arguments.url, settings)
    except SettingsError as error:
        return _refused(str(error))
    key = choosing.key_for(arguments.key, os.environ.get(KEY_VARIABLE), settings, mode).strip()
    if not key.isprintable():
        return _refused("--key: must be one word")
    order = Order(arguments.client, settings, url, key, mode, arguments.url is not None, arguments.timeout)
    client = FILE_CLIENTS.get(arguments.client or "")
    if client is not None:
        findings = _examine_file_client(client, order, arguments)
    elif order.client is not None:
        findings = asyncio.run(_examine_spoken(order))
    else:
        findings = [*found, *asyncio.run(_examine_gateway(order))]
    return _report(_without_key(_once(findings), key), as_json=arguments.json)


def read_settings(config: str | None) -> tuple[Settings, list[Finding]]:
    """The settings in effect here; where they can't be used, the defaults, and why."""
    path = Path(config).expanduser() if config else find_settings_file(os.environ, Path.cwd())
    try:
        loaded = load_settings(path)
    except SettingsError as error:
        return Settings(), [problem(f"settings: {one}", "", "kvgate config check FILE") for one in error.problems]
    return loaded.settings, [warning(f"settings: {notice}") for notice in loaded.notices]


def _examine_file_client(client: Client, order: Order, arguments: argparse.Namespace) -> list[Finding]:
    home, environ = place(arguments)
    path = client.find_file(home, environ)
    try:
        plain = open_document(client.format, files.read(path).text).plain()
    except (DocumentError, ClientFileError) as error:
        return [problem(f"{path}: {error}", "", "correct the file; it is left as it is")]
    connection = client.read_back(plain, environ)
    found = list(check_file(plain, connection, client))
    if connection is None:
        return found
    wanted_url = order.url if order.url_was_named else None
    patient = Patient(client, connection, wanted_url, order.mode)
    return _without_key([*found, *asyncio.run(_with_session(patient, order))], connection.key)


async def _with_session(patient: Patient, order: Order) -> list[Finding]:
    async with new_session() as session:
        return await examine_client(session, patient, os.environ, order.timeout_seconds)


async def _examine_gateway(order: Order) -> list[Finding]:
    modes = [order.mode] if order.mode else []
    async with new_session() as session:
        return await examine_gateway(session, order.url, order.key, modes, order.timeout_seconds)


async def _examine_spoken(order: Order) -> list[Finding]:
    assert order.client is not None
    async with new_session() as session:
        connection = Connection(order.url, order.key)
        return await examine_routes(session, order.client, connection, order.mode, order.timeout_seconds)


def _report(findings: Sequence[Finding], *, as_json: bool) -> int:
    is_bad = any(finding.level is Level.PROBLEM for finding in findings)
    if as_json:
        rows = [asdict(finding) for finding in findings]
        print(json.dumps({"ok": not is_bad, "findings": rows}, indent=2, ensure_ascii=False))
    else:
        for finding in findings:
            print("\n".join(lines_of(finding)))
    return 1 if is_bad else 0


def lines_of(finding: Finding) -> list[str]:
    lines = [f"{finding.level:<8} {finding.what}"]
    lines += [f"{'':8} why: {finding.why}"] if finding.why else []
    return lines + ([f"{'':8} do:  {finding.what_to_do}"] if finding.what_to_do else [])


def _once(findings: Sequence[Finding]) -> list[Finding]:
    return list(dict.fromkeys(findings))


def _without_key(findings: Sequence[Finding], key: str) -> list[Finding]:
    """A server that echoes the key must not get it printed."""

    def clean(text: str) -> str:
        return choosing.masked(text, key)

    return [Finding(one.level, clean(one.what), clean(one.why), clean(one.what_to_do)) for one in findings]


def _refused(message: str) -> int:
    print(f"kvgate doctor: {message}", file=sys.stderr)
    return EXIT_BAD_OPTIONS
