"""Continue: one entry of `models` in `~/.continue/config.yaml`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.clients.client import Api, Client, Environ
from gateway.clients.connection import Connection, number_of, table_of, text_of, texts_of
from gateway.clients.document import Format
from gateway.clients.entries import AnyEntry, Entry
from gateway.clients.target import ENTRY_NAME, MODE_HEADER, TIMEOUT_MILLISECONDS, Target


def find_file(home: Path, environ: Environ) -> Path:
    named = environ.get("CONTINUE_GLOBAL_DIR")
    return (Path(named) if named else home / ".continue") / "config.yaml"


def entries(target: Target) -> Sequence[AnyEntry]:
    model: dict[str, Any] = {
        "name": ENTRY_NAME,
        "provider": "openai",
        "model": target.model,
        "apiBase": target.openai_url,
        "apiKey": target.key,
    }
    if target.limits:
        model["defaultCompletionOptions"] = {
            "contextLength": target.limits.context,
            "maxTokens": target.limits.output,
        }
    model["requestOptions"] = {"timeout": TIMEOUT_MILLISECONDS // 1000}
    if target.mode:
        model["requestOptions"]["headers"] = {MODE_HEADER: str(target.mode)}
    return (
        Entry(("name",), "Local", keep=True),  # a file without these three is refused
        Entry(("version",), "1.0.0", keep=True),
        Entry(("schema",), "v1", keep=True),
        Entry(("models", ENTRY_NAME), model),
    )


def read_back(plain: Mapping[str, Any], _environ: Environ) -> Connection | None:
    """Our entry: which model is used is chosen in the editor."""
    model = table_of(table_of(plain.get("models")).get(ENTRY_NAME))
    base_url = text_of(model.get("apiBase"))
    if not base_url:
        return None
    options = table_of(model.get("defaultCompletionOptions"))
    return Connection(
        base_url=base_url,
        key=text_of(model.get("apiKey")),
        model=text_of(model.get("model")),
        headers=texts_of(table_of(model.get("requestOptions")).get("headers")),
        context=number_of(options.get("contextLength")),
        output=number_of(options.get("maxTokens")),
    )


CLIENT = Client(
    name="continue",
    title="Continue",
    api=Api.CHAT,
    format=Format.YAML,
    find_file=find_file,
    entries=entries,
    read_back=read_back,
    first_request_tokens=3_000,
    then=f"choose the model {ENTRY_NAME} in the editor",
)
