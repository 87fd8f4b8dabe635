"""Codex CLI: a provider in `~/.codex/config.toml`. Checked with 0.171, which refuses unknown keys of a provider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.clients.client import Api, Client, Environ
from gateway.clients.connection import Connection, number_of, table_of, text_of, texts_of
from gateway.clients.document import MISSING, Format
from gateway.clients.entries import AnyEntry, Entry
from gateway.clients.merging import Owned
from gateway.clients.target import ENTRY_NAME, MODE_HEADER, TIMEOUT_MILLISECONDS, Target

_PROVIDER = ("model_providers", ENTRY_NAME)


def find_file(home: Path, environ: Environ) -> Path:
    named = environ.get("CODEX_HOME")
    return (Path(named) if named else home / ".codex") / "config.toml"


def entries(target: Target) -> Sequence[AnyEntry]:
    provider: dict[str, Any] = {
        "name": ENTRY_NAME,
        "base_url": target.openai_url,
        "wire_api": "responses",  # the only one it still knows
        "experimental_bearer_token": target.key,
        "stream_idle_timeout_ms": TIMEOUT_MILLISECONDS,
    }
    return (
        Entry(("model",), target.model),
        Entry(("model_provider",), ENTRY_NAME),
        Entry(("model_context_window",), target.limits.context if target.limits else MISSING),
        *(Entry((*_PROVIDER, name), value) for name, value in provider.items()),
        Entry((*_PROVIDER, "env_key"), MISSING),  # it would beat the token
        Entry((*_PROVIDER, "http_headers", MODE_HEADER), str(target.mode) if target.mode else MISSING),
    )


def read_back(plain: Mapping[str, Any], environ: Environ) -> Connection | None:
    name = text_of(plain.get("model_provider"))
    provider = table_of(table_of(plain.get("model_providers")).get(name))
    base_url = text_of(provider.get("base_url"))
    if not base_url:
        return None
    env_key = text_of(provider.get("env_key"))
    from_environ = {
        header: environ[variable]
        for header, variable in texts_of(provider.get("env_http_headers")).items()
        if environ.get(variable)
    }
    return Connection(
        base_url=base_url,
        key=environ.get(env_key, "") if env_key else text_of(provider.get("experimental_bearer_token")),
        model=text_of(plain.get("model")),
        headers=texts_of(provider.get("http_headers")) | from_environ,
        query=texts_of(provider.get("query_params")),
        context=number_of(plain.get("model_context_window")),
        remarks=tuple(_remarks(plain, provider, environ)),
    )


def _remarks(plain: Mapping[str, Any], provider: Mapping[str, Any], environ: Environ) -> list[str]:
    found: list[str] = []
    env_key = text_of(provider.get("env_key"))
    if env_key and not environ.get(env_key):
        found.append(f"the key is read from the environment variable {env_key}, which is not set here")
    if provider.get("wire_api") == "chat":
        found.append('wire_api = "chat" is an error in today\'s Codex; it must be "responses"')
    if plain.get("profile"):
        found.append(f"profile = {plain['profile']!r} may choose another model and provider")
    return found


def remarks(_target: Target, plain: Mapping[str, Any]) -> Sequence[str]:
    return [remark for remark in _remarks(plain, {}, {}) if "profile" in remark]


CLIENT = Client(
    name="codex",
    title="Codex",
    api=Api.RESPONSES,
    format=Format.TOML,
    find_file=find_file,
    entries=entries,
    read_back=read_back,
    owned=(Owned(_PROVIDER, (*_PROVIDER, "base_url")),),
    remarks=remarks,
    first_request_tokens=10_000,
    then="run `codex`",
)
