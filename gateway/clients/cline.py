"""Cline, extension and CLI: `providers.json`, the provider "OpenAI Compatible". Checked with cline 3.0.65."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gateway.clients.client import Api, Client, Environ
from gateway.clients.connection import Connection, number_of, table_of, text_of, texts_of
from gateway.clients.document import MISSING, Format
from gateway.clients.entries import AnyEntry, Entry
from gateway.clients.merging import Owned
from gateway.clients.target import MODE_HEADER, TIMEOUT_MILLISECONDS, Target

PROVIDER = "openai-compatible"  # the only name under which Cline takes any base URL
_ENTRY = ("providers", PROVIDER)
_SETTINGS = (*_ENTRY, "settings")


def find_file(home: Path, environ: Environ) -> Path:
    named = environ.get("CLINE_PROVIDER_SETTINGS_PATH")
    if named:
        return Path(named)
    data = environ.get("CLINE_DATA_DIR")
    return (Path(data) if data else home / ".cline" / "data") / "settings" / "providers.json"


def entries(target: Target) -> Sequence[AnyEntry]:
    limits = target.limits
    settings: dict[str, Any] = {
        "provider": PROVIDER,
        "apiKey": target.key,
        "model": target.model,
        "baseUrl": target.openai_url,
        "timeout": TIMEOUT_MILLISECONDS,
        "contextWindow": limits.context if limits else MISSING,
        "maxTokens": limits.output if limits else MISSING,
    }
    return (
        Entry(("version",), 1, keep=True),
        Entry(("lastUsedProvider",), PROVIDER),
        Entry(("modes",), {}, keep=True),
        *(Entry((*_SETTINGS, name), value) for name, value in settings.items()),
        Entry((*_SETTINGS, "headers", MODE_HEADER), str(target.mode) if target.mode else MISSING),
        Entry((*_ENTRY, "updatedAt"), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z"), keep=True),
        Entry((*_ENTRY, "tokenSource"), "manual", keep=True),
    )


def read_back(plain: Mapping[str, Any], _environ: Environ) -> Connection | None:
    settings = table_of(table_of(table_of(plain.get("providers")).get(PROVIDER)).get("settings"))
    base_url = text_of(settings.get("baseUrl"))
    if not base_url:
        return None
    used = text_of(plain.get("lastUsedProvider"))
    remarks = (f"lastUsedProvider is {used!r}, so Cline asks that one",) if used not in {"", PROVIDER, "openai"} else ()
    return Connection(
        base_url=base_url,
        key=text_of(settings.get("apiKey")),
        model=text_of(settings.get("model")),
        headers=texts_of(settings.get("headers")),
        context=number_of(settings.get("contextWindow")),
        output=number_of(settings.get("maxTokens")),
        remarks=remarks,
    )


CLIENT = Client(
    name="cline",
    title="Cline",
    api=Api.CHAT,
    format=Format.JSON,
    find_file=find_file,
    entries=entries,
    read_back=read_back,
    owned=(Owned(_ENTRY, (*_SETTINGS, "baseUrl")),),
    first_request_tokens=6_000,
    then="an open Cline reads it at its next start; its model picker shows it as OpenAI Compatible",
)
