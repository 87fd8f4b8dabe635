"""Checks of what a client is configured with, before anything is sent. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from gateway.clients.client import Api, Client
from gateway.clients.connection import Connection
from gateway.core.types import CacheMode
from gateway.doctor.answer import Answer
from gateway.doctor.finding import Finding, ok, problem, warning

CC_SWITCH_PORT = 15721


def channel_of(connection: Connection) -> tuple[str | None, str]:
    """The mode that the client sends and the channel that carries it; the highest in the order of precedence."""
    if connection.mode_header:
        return connection.mode_header.strip().lower(), "header"
    if connection.query.get("cache_mode"):
        return connection.query["cache_mode"], "query"
    first = urlsplit(connection.base_url).path.strip("/").partition("/")[0]
    if first in set(CacheMode):
        return first, "path"
    suffix = connection.model.rpartition(":")[2]
    return (suffix, "model") if suffix in set(CacheMode) else (None, "")


def check_origin(connection: Connection, wanted: str | None, client: Client) -> Iterator[Finding]:
    """That the client is pointed at the gateway that was named."""
    origin, asked = _origin(connection.base_url), _origin(wanted or "")
    if wanted and origin != asked:
        yield problem(
            f"{client.title} is pointed at {connection.base_url}, not at {wanted}",
            "",
            f"kvgate connect {client.name} --url {wanted} --write",
        )


def check_is_kvgate(health: Answer, connection: Connection) -> Iterator[Finding]:
    """Nothing is sent to a server that is not ours: it may cost money, and it isn't what was asked about."""
    answer = health.json()
    if isinstance(answer, Mapping) and answer.get("name") == "kvgate":
        return
    if urlsplit(connection.base_url).port == CC_SWITCH_PORT:
        yield problem(
            f"{connection.base_url} is CC Switch's proxy, which sends on to whatever is chosen in it",
            "X-Cache-Mode survives it, but nothing is sent there by this check",
            "check the gateway itself with: kvgate doctor",
        )
    elif health.failure:
        yield problem(
            f"nothing answers at {connection.base_url}: {health.failure}", "", "start the gateway with: kvgate serve"
        )
    else:
        yield problem(
            f"what answers at {connection.base_url} is no kvgate gateway (/health: HTTP {health.status})",
            "nothing more is sent there",
            "kvgate connect writes the gateway's address",
        )


def check_base_url(connection: Connection, api: Api) -> Iterator[Finding]:
    """Shapes of a base URL that lead elsewhere."""
    path = urlsplit(connection.base_url).path
    if "//" in path:
        yield warning(f"the base URL has a doubled slash: {connection.base_url}", "", "remove it")
    if urlsplit(connection.base_url).query:
        yield problem("the base URL has a query string", "the path is added after it", "remove it")
    if path.rstrip("/").endswith(("/completions", "/messages", "/responses")):
        yield problem(
            f"the base URL ends in an API's path: {connection.base_url}",
            "the client adds it once more",
            "end it before that, such as with /v1",
        )
    bare = path.strip("/") in {"", *CacheMode}
    if api in {Api.CHAT, Api.RESPONSES} and bare:
        yield warning(
            f"the base URL has no /v1: {connection.base_url}",
            "kvgate serves it all the same; other servers do not",
            "add /v1",
        )


def check_mode_is_sent(connection: Connection, wanted: str | None, client: Client) -> Iterator[Finding]:
    mode, _ = channel_of(connection)
    if wanted is not None and mode != wanted:
        yield problem(
            f"{client.title} sends {f'the mode {mode}' if mode else 'no mode'}, not {wanted}",
            "",
            f"kvgate connect {client.name} --mode {wanted} --write",
        )


def check_remarks(connection: Connection) -> Iterator[Finding]:
    for remark in connection.remarks:
        yield warning(remark)


def check_model(connection: Connection, listed: Mapping[str, int | None], client: Client) -> Iterator[Finding]:
    """That the model is served, and holds what the client believes it does."""
    if not connection.model:
        yield warning("no model is set", "the client sends its own default name", f"kvgate connect {client.name}")
        return
    if connection.model not in listed:
        shown = ", ".join(list(listed)[:8]) or "none"
        yield warning(
            f"the model {connection.model!r} is not in the gateway's list",
            f"it lists: {shown}",
            "kvgate connect --model",
        )
        return
    context = listed[connection.model]
    if context is None:
        return
    if connection.context is not None and connection.context > context:
        yield warning(
            f"the client believes that {connection.model} holds {connection.context} tokens; it holds {context}",
            "it shortens its conversation too late",
            f"kvgate connect {client.name} --write",
        )
    if connection.output is not None and connection.output >= context:
        yield problem(
            f"the client asks for {connection.output} tokens of answer; {connection.model} holds {context} in all",
            "no room is left for the question",
            f"kvgate connect {client.name} --write",
        )


def check_models_list(answer: Answer, api: Api) -> Iterator[Finding]:
    """That the list has the shape this client reads."""
    body = answer.json()
    name = "models" if api in {Api.RESPONSES, Api.GEMINI} else "data"
    if answer.status != 200 or not isinstance(body, Mapping) or not isinstance(body.get(name), list):
        what = answer.failure or f"HTTP {answer.status}"
        yield warning(f"the list of models can't be read: {what}", f"this client looks for a list {name!r}")


def check_probe(answer: Answer) -> Iterator[Finding]:
    if answer.status != 200:
        yield warning(f"HEAD / is answered with HTTP {answer.status}", "the client looks whether anybody is there")


def check_proxies(environ: Mapping[str, str], host: str) -> Iterator[Finding]:
    """A proxy in the environment gets the clients' requests unless this host is excepted."""
    lower = {name.lower(): value for name, value in environ.items()}
    proxy = lower.get("http_proxy") or lower.get("all_proxy")
    excepted = [part.strip().lower() for part in lower.get("no_proxy", "").split(",")]
    if proxy and "*" not in excepted and host.lower() not in excepted:
        yield warning(
            "HTTP_PROXY is set, and NO_PROXY does not except the gateway's host",
            "clients may send their requests to that proxy",
            f"add {host} to NO_PROXY",
        )


def check_file(plain: Mapping[str, object] | None, connection: Connection | None, client: Client) -> Iterator[Finding]:
    if connection is not None:
        key = "a key" if connection.key else "no key"
        model = f"model {connection.model}" if connection.model else "no model"
        yield ok(f"{client.title} is configured with {connection.base_url}, {model}, {key}")
    elif plain:
        yield problem(
            f"{client.title}'s settings point it nowhere near here", "", f"kvgate connect {client.name} --write"
        )
    else:
        yield problem(f"{client.title} has no settings yet", "", f"kvgate connect {client.name} --write")


def _origin(url: str) -> tuple[str, int | None]:
    parts = urlsplit(url)
    host = (parts.hostname or "").replace("localhost", "127.0.0.1")
    return host, parts.port or (443 if parts.scheme == "https" else 80)
