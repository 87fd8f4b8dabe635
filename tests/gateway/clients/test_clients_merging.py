"""Whatever a settings file holds: our entries go in, and out again, and the rest is as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tomlkit
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gateway.clients.catalog import FILE_CLIENTS
from gateway.clients.client import Client
from gateway.clients.document import DocumentError, Format, value_at
from gateway.clients.entries import Entry
from gateway.clients.merging import merge, open_document, unmerge
from gateway.clients.target import Limits, Target
from gateway.core.types import CacheMode

TARGET = Target("http://127.0.0.1:8000", "sk-key", "smollm2", CacheMode.SPLIT, Limits(8192, 1024))


def dumped(format_: Format, plain: dict[str, Any]) -> str:
    if format_ is Format.TOML:
        return tomlkit.dumps(plain)
    if format_ is Format.ENV:
        return "".join(f"{name}={value}\n" for name, value in plain.items())
    return json.dumps(plain, indent=2)


@st.composite
def settings_of(draw: st.DrawFn, client: Client) -> dict[str, Any]:
    """Settings that hold some of our own places, with other values, and foreign ones beside them."""
    plain: dict[str, Any] = {}
    paths = [entry.path for entry in client.entries(TARGET)]
    for path in draw(st.lists(st.sampled_from(paths), max_size=6, unique=True)):
        table = plain
        for name in path[: draw(st.integers(0, len(path) - 1))]:
            inner = table.setdefault(name, {})
            if not isinstance(inner, dict):
                break
            table = inner
        else:
            table[draw(st.sampled_from([path[-1], "foreign"]))] = draw(st.sampled_from(["x", "y z"]))
    return plain


@pytest.mark.parametrize("name", ["cline", "claude", "codex", "opencode", "gemini"])
@settings(max_examples=60, derandomize=True, deadline=None)
@given(data=st.data())
def test_what_goes_in_comes_out_again_and_nothing_else_changes(name: str, data: st.DataObject):
    client = FILE_CLIENTS[name]
    before = data.draw(settings_of(client))
    text = dumped(client.format, before)
    assume(open_document(client.format, text).plain() == before)
    entries = client.entries(TARGET)
    if any(value_at(before, e.path[:depth]) in ("x", "y z") for e in entries for depth in range(1, len(e.path))):
        with pytest.raises(DocumentError, match="something else than a table"):
            merge(client.format, text, entries, client.owned)
        return
    merged = merge(client.format, text, entries, client.owned)
    again = merge(client.format, merged.text, client.entries(TARGET), client.owned)
    assert (again.text, again.written) == (merged.text, ())
    taken_out = unmerge(client.format, merged.text, text, merged.written, merged.made)
    assert open_document(client.format, taken_out.text).plain() == before
    assert taken_out.left == ()
    assert taken_out.is_empty is (not before)


def test_an_edit_that_would_touch_other_settings_is_refused(monkeypatch: pytest.MonkeyPatch):
    """The result is read back before anything is written."""

    class Forgetful:
        text = "{}"

        def plain(self) -> dict[str, Any]:
            return {"theirs": 1}

        def set(self, path: tuple[str, ...], value: Any) -> None: ...

        def remove(self, path: tuple[str, ...]) -> None: ...

    monkeypatch.setattr("gateway.clients.merging.JsonDocument", lambda _text: Forgetful())
    with pytest.raises(DocumentError, match="without touching other settings"):
        merge(Format.JSON, "{}", [Entry(("a",), 1)])


@pytest.mark.parametrize(
    "text",
    [
        "model_providers = {}\n",
        "model_providers = {a = {name = 'x'}}\n",
        "[model_providers]\nkvgate = {base_url = 'x'}\n",
        "[model_providers.kvgate]\nhttp_headers = {A = '1'}\nenv_key = 'X'\n",
        "[a]\nx = 1\n[model_providers.b]\nname = 'b'\n[c]\ny = 2\n[model_providers.d]\nname = 'd'\n",
        "[model_providers.kvgate]\nbase_url = 'x'\n[z]\n[model_providers.kvgate.http_headers]\nA = '1'\n",
        "# only a comment",
    ],
)
def test_toml_tables_written_in_any_way_take_our_entries_and_give_them_back(text: str):
    codex = FILE_CLIENTS["codex"]
    merged = merge(codex.format, text, codex.entries(TARGET), codex.owned)
    connection = codex.read_back(open_document(codex.format, merged.text).plain(), {})
    assert connection is not None
    assert connection.mode_header == "split"
    taken_out = unmerge(codex.format, merged.text, text, merged.written, merged.made)
    assert open_document(codex.format, taken_out.text).plain() == open_document(codex.format, text).plain()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("codex", "model_providers.kvgate.base_url = 'x'\n"),
        ("codex", "[[model_providers]]\nx = 1\n"),
        ("continue", "models: &m\n  - name: a\nother: *m\n"),
        ("continue", "models:\n  - a\n"),
        ("continue", "---\nname: x\n...\n"),
    ],
)
def test_layouts_that_can_not_be_edited_safely_are_refused(name: str, text: str):
    client = FILE_CLIENTS[name]
    with pytest.raises(DocumentError):
        merge(client.format, text, client.entries(TARGET), client.owned)
