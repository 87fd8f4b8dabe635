"""OpenCode: a provider in its global `opencode.json` or `opencode.jsonc`. Checked with 1.18.33."""

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

_PROVIDER = ("provider", ENTRY_NAME)


def find_file(home: Path, environ: Environ) -> Path:
    """Of two files OpenCode merges both, and the one with comments wins."""
    named = environ.get("OPENCODE_CONFIG")
    if named:
        return Path(named)
    config = environ.get("XDG_CONFIG_HOME")
    folder = (Path(config) if config else home / ".config") / "opencode"
    commented = folder / "opencode.jsonc"
    return commented if commented.exists() else folder / "opencode.json"


def entries(target: Target) -> Sequence[AnyEntry]:
    limits = target.limits
    limit = {"context": limits.context, "output": limits.output} if limits else MISSING
    options: dict[str, Any] = {
        "baseURL": target.openai_url,
        "apiKey": target.key,
        "headerTimeout": TIMEOUT_MILLISECONDS,
        "chunkTimeout": TIMEOUT_MILLISECONDS,
    }
    return (
        Entry(("$schema",), "https://opencode.ai/config.json", keep=True),
        Entry(("model",), f"{ENTRY_NAME}/{target.model}"),
        Entry((*_PROVIDER, "npm"), "@ai-sdk/openai-compatible"),
        Entry((*_PROVIDER, "name"), ENTRY_NAME),
        *(Entry((*_PROVIDER, "options", name), value) for name, value in options.items()),
        Entry((*_PROVIDER, "options", "headers", MODE_HEADER), str(target.mode) if target.mode else MISSING),
        Entry((*_PROVIDER, "models", target.model, "name"), target.model),
        Entry((*_PROVIDER, "models", target.model, "limit"), limit),
    )


def read_back(plain: Mapping[str, Any], environ: Environ) -> Connection | None:
    name, _, model = text_of(plain.get("model")).partition("/")
    provider = table_of(table_of(plain.get("provider")).get(name))
    options = table_of(provider.get("options"))
    base_url = text_of(options.get("baseURL"))
    if not base_url:
        return None
    entry = table_of(table_of(provider.get("models")).get(model))
    limit = table_of(entry.get("limit"))
    remarks = () if entry else (f"the model {model!r} is not in the provider's `models`, so OpenCode doesn't know it",)
    return Connection(
        base_url=_filled_in(base_url, environ),
        key=_filled_in(text_of(options.get("apiKey")), environ),
        model=model,
        headers=texts_of(options.get("headers")) | texts_of(entry.get("headers")),
        context=number_of(limit.get("context")),
        output=number_of(limit.get("output")),
        remarks=remarks,
    )


def _filled_in(text: str, environ: Environ) -> str:
    """`{env:NAME}` as OpenCode fills it in."""
    if text.startswith("{env:") and text.endswith("}"):
        return environ.get(text[5:-1], "")
    return text


CLIENT = Client(
    name="opencode",
    title="OpenCode",
    api=Api.CHAT,
    format=Format.JSON,
    find_file=find_file,
    entries=entries,
    read_back=read_back,
    owned=(Owned(_PROVIDER, (*_PROVIDER, "options", "baseURL")),),
    first_request_tokens=8_000,
    then="run `opencode`; a project's own opencode.json may choose another model",
)
