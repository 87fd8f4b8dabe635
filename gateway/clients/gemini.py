"""Gemini CLI: `~/.gemini/.env`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.clients.client import Api, Client, Environ
from gateway.clients.connection import Connection
from gateway.clients.document import MISSING, Format
from gateway.clients.entries import AnyEntry, Entry, HeaderEntry
from gateway.clients.header_list import split_headers
from gateway.clients.target import MODE_HEADER, Target

HEADERS = "GEMINI_CLI_CUSTOM_HEADERS"
RIVALS = ("GOOGLE_GENAI_USE_VERTEXAI", "GOOGLE_GENAI_USE_GCA")  # with one of these it goes elsewhere


def find_file(home: Path, environ: Environ) -> Path:
    named = environ.get("GEMINI_CLI_HOME")
    return (Path(named) if named else home) / ".gemini" / ".env"


def entries(target: Target) -> Sequence[AnyEntry]:
    return (
        Entry(("GEMINI_API_KEY",), target.key),
        Entry(("GOOGLE_GEMINI_BASE_URL",), target.url),  # it adds /v1beta
        Entry(("GEMINI_MODEL",), target.model),
        HeaderEntry((HEADERS,), MODE_HEADER, str(target.mode) if target.mode else None, ","),
        *(Entry((name,), MISSING) for name in RIVALS),
    )


def read_back(plain: Mapping[str, Any], environ: Environ) -> Connection | None:
    """The shell's variables win over the file's."""
    env = {**{name: str(value) for name, value in plain.items()}, **environ}
    base_url = env.get("GOOGLE_GEMINI_BASE_URL", "")
    if not base_url:
        return None
    is_bearer = env.get("GEMINI_API_KEY_AUTH_MECHANISM") == "bearer"
    return Connection(
        base_url=base_url,
        key=env.get("GEMINI_API_KEY", ""),
        key_header="Authorization" if is_bearer else "x-goog-api-key",
        model=env.get("GEMINI_MODEL", ""),
        headers=split_headers(env.get(HEADERS, ""), ","),
        remarks=tuple(f"{name} is set: Gemini CLI then asks Google" for name in RIVALS if env.get(name)),
    )


CLIENT = Client(
    name="gemini",
    title="Gemini CLI",
    api=Api.GEMINI,
    format=Format.ENV,
    find_file=find_file,
    entries=entries,
    read_back=read_back,
    first_request_tokens=10_000,
    then="run `gemini` and choose the API key as the way to log in, if it asks; `gemini -p` can't ask: it needs "
    '{"security": {"auth": {"selectedType": "gemini-api-key"}}} in settings.json beside that file',
)
