"""One examination: asks what is needed, in order, and hands the answers to the checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import aiohttp

from gateway.clients.client import Api, Client
from gateway.clients.connection import Connection
from gateway.clients.served import parse
from gateway.clients.target import MODE_HEADER
from gateway.core.types import CacheMode
from gateway.doctor import client_checks, gateway_checks, stream_checks
from gateway.doctor.answer import Answer
from gateway.doctor.asking import PLAIN, SIZES, SMALL, key_headers, main_request, models_request, probe_request
from gateway.doctor.fetch import CONNECT_SECONDS, Ask, fetch
from gateway.doctor.finding import Finding, Level

SHORT_SECONDS = 10.0  # for what has to be answered at once


@dataclass(frozen=True, slots=True)
class Patient:
    """A client, and what its settings say."""

    client: Client
    connection: Connection
    wanted_url: str | None = None
    wanted_mode: CacheMode | None = None


def new_session() -> aiohttp.ClientSession:
    """Straight to the gateway: proxies of the environment are not used."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
    return aiohttp.ClientSession(timeout=timeout, auto_decompress=True)


async def examine_client(
    session: aiohttp.ClientSession, patient: Patient, environ: Mapping[str, str], timeout_seconds: float
) -> list[Finding]:
    client, connection = patient.client, patient.connection
    host = urlsplit(connection.base_url).hostname or ""
    found = [
        *client_checks.check_origin(connection, patient.wanted_url, client),
        *client_checks.check_base_url(connection, client.api),
        *client_checks.check_mode_is_sent(connection, patient.wanted_mode, client),
        *client_checks.check_remarks(connection),
        *client_checks.check_proxies(environ, host),
    ]
    health = await fetch(session, Ask("GET", f"{_origin(connection.base_url)}/health"), SHORT_SECONDS)
    strange = list(client_checks.check_is_kvgate(health, connection))
    if strange:
        return [*found, *strange]
    found += await _models_and_probe(session, client, connection)
    return [*found, *await converse(session, client.name, client.api, connection, timeout_seconds)]


async def _models_and_probe(session: aiohttp.ClientSession, client: Client, connection: Connection) -> list[Finding]:
    found: list[Finding] = []
    probe = probe_request(client.api, connection)
    if probe is not None:
        found += client_checks.check_probe(await fetch(session, probe, SHORT_SECONDS))
    ask = models_request(client.name, client.api, connection)
    found += client_checks.check_models_list(await fetch(session, ask, SHORT_SECONDS), client.api)
    # With a plain Bearer key the list comes in the one shape that names everything.
    own = Ask("GET", f"{_origin(connection.base_url)}/v1/models", key_headers(Connection("", connection.key)))
    answer = await fetch(session, own, SHORT_SECONDS)
    if answer.status == 200:
        found += client_checks.check_model(connection, parse(answer.body).models, client)
    return found


async def converse(
    session: aiohttp.ClientSession, name: str, api: Api, connection: Connection, timeout_seconds: float
) -> list[Finding]:
    """A turn as large as the client's own; if the model can't hold it, a small one, for the rest of the checks."""
    found: list[Finding] = []
    answer = await fetch(session, main_request(name, api, connection, SIZES.get(name, SMALL)), timeout_seconds)
    if stream_checks.is_overflow(answer):
        found += stream_checks.check_accepted(answer, api)
        answer = await fetch(session, main_request(name, api, connection, SMALL), timeout_seconds)
    return [*found, *check_turn(answer, api, connection)]


def check_turn(answer: Answer, api: Api, connection: Connection) -> list[Finding]:
    refused = list(stream_checks.check_accepted(answer, api))
    if refused:
        return refused
    asked, channel = client_checks.channel_of(connection)
    return [
        *stream_checks.check_mode(answer, asked=asked, channel=channel),
        *stream_checks.check_stream(answer, api),
        *stream_checks.check_usage(answer, api),
    ]


async def examine_gateway(
    session: aiohttp.ClientSession, url: str, key: str, modes: Sequence[CacheMode], timeout_seconds: float
) -> list[Finding]:
    """The gateway itself; each of the modes is tried with one short request."""
    headers = key_headers(Connection(url, key))

    async def ask(path: str) -> Answer:
        return await fetch(session, Ask("GET", url + path, headers), SHORT_SECONDS)

    health = await ask("/health")
    found = list(gateway_checks.check_reachable(health, url))
    if any(finding.level is Level.PROBLEM for finding in found):
        return found
    ready, models = await ask("/ready"), await ask("/v1/models")
    state = ready.json()
    notices: Iterable[str] = state.get("notices", ()) if isinstance(state, Mapping) else ()
    found += gateway_checks.check_ready(ready)
    found += gateway_checks.check_notices(notices, "settings")
    found += gateway_checks.check_models(models)
    found += gateway_checks.check_engines(await ask("/v1/engines"))
    listed = parse(models.body)
    for mode in _modes_to_try(modes, ready, is_served=bool(listed.models)):
        connection = Connection(f"{url}/v1", key, model=listed.first() or "", headers={MODE_HEADER: str(mode)})
        answer = await fetch(session, main_request("curl", Api.CHAT, connection, PLAIN), timeout_seconds)
        found += check_turn(answer, Api.CHAT, connection)
    return found


def _modes_to_try(modes: Sequence[CacheMode], ready: Answer, *, is_served: bool) -> list[CacheMode]:
    """Those that were named, else those that the gateway has."""
    state = ready.json()
    known = state.get("modes", {}) if isinstance(state, Mapping) else {}
    if not is_served:
        return []
    return list(modes) or [mode for mode in CacheMode if str(mode) in known]


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


# What CC Switch's links point at: the API of each program, and whether the mode is in the path.
ROUTES: dict[str, tuple[tuple[str, Api, str, bool], ...]] = {
    "curl": (("curl", Api.CHAT, "/v1", False),),
    "cc-switch": (
        ("claude", Api.MESSAGES, "", False),
        ("codex", Api.RESPONSES, "/v1", True),
        ("opencode", Api.CHAT, "/v1", True),
        ("gemini", Api.GEMINI, "", True),
    ),
}


async def examine_routes(
    session: aiohttp.ClientSession, name: str, base: Connection, mode: CacheMode | None, timeout_seconds: float
) -> list[Finding]:
    """A client without a settings file of its own: what is printed for it is tried, with short requests."""
    url = base.base_url
    health = await fetch(session, Ask("GET", f"{url}/health"), SHORT_SECONDS)
    found = list(gateway_checks.check_reachable(health, url))
    if any(finding.level is Level.PROBLEM for finding in found):
        return found
    models = await fetch(session, Ask("GET", f"{url}/v1/models", key_headers(base)), SHORT_SECONDS)
    found += gateway_checks.check_models(models)
    model = parse(models.body).first()
    for title, api, ending, by_path in ROUTES[name] if model else ():
        address = f"{url}/{mode}{ending}" if by_path and mode else url + ending
        headers = {MODE_HEADER: str(mode)} if mode and not by_path else {}
        connection = Connection(address, base.key, model=model or "", headers=headers)
        answer = await fetch(
            session, main_request(title, api, connection, PLAIN if title == "curl" else SMALL), timeout_seconds
        )
        found += [_named(finding, title) for finding in check_turn(answer, api, connection)]
    return found


def _named(finding: Finding, title: str) -> Finding:
    return replace(finding, what=f"{title}: {finding.what}")
