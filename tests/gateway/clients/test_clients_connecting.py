"""Settings files are written whole or not at all, with a backup, and `undo` gives back what was there."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.clients import connecting, files
from gateway.clients.catalog import FILE_CLIENTS
from gateway.clients.client import Client
from gateway.clients.connecting import RECORD_ENDING, UndoResult, WriteResult
from gateway.clients.errors import ClientFileError
from gateway.clients.merging import open_document
from gateway.clients.target import Limits, Target
from gateway.core.types import CacheMode

TARGET = Target("http://127.0.0.1:8000", "sk-key-0123456789", "smollm2", CacheMode.SPLIT, Limits(8192, 1024))

PRESENT = {
    "cline": '{"version":1,"lastUsedProvider":"anthropic","modes":{},"providers":{"anthropic":{"settings":'
    '{"provider":"anthropic","apiKey":"theirs"},"updatedAt":"2026-01-01T00:00:00.000Z","tokenSource":"manual"}}}',
    "claude": '{\n  // mine\n  "permissions": {"allow": ["Bash(ls)"]},\n'
    '  "env": {"MY": "1", "ANTHROPIC_API_KEY": "theirs", "ANTHROPIC_CUSTOM_HEADERS": "X-Mine: 1"},\n}\n',
    "codex": '# mine\nmodel = "gpt-5"\n\n[model_providers.other]\nname = "Other" # theirs\n',
    "opencode": '{\n  "theme": "dark", // mine\n  "provider": {"other": {"options": {"apiKey": "theirs"}}}\n}\n',
    "continue": "name: Mine\nversion: 0.0.1\nschema: v1\nmodels:\n  - name: Other # theirs\n    provider: ollama\n",
    "gemini": "# mine\nGEMINI_API_KEY=theirs\nOTHER=1\nGEMINI_CLI_CUSTOM_HEADERS='X-Mine: 1'\n",
}
ALL = pytest.mark.parametrize("client", FILE_CLIENTS.values(), ids=list(FILE_CLIENTS))


def write(client: Client, path: Path, target: Target = TARGET) -> WriteResult:
    return connecting.write(path, client.format, client.entries(target), client.owned)


def undo(client: Client, path: Path) -> UndoResult:
    result = connecting.undo(path, client.format)
    assert result is not None
    return result


def plain(client: Client, path: Path) -> dict[str, Any]:
    return open_document(client.format, path.read_text()).plain()


def present(client: Client, tmp_path: Path) -> Path:
    path = client.find_file(tmp_path, {})
    path.parent.mkdir(parents=True)
    path.write_text(PRESENT[client.name])
    return path


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@ALL
def test_a_missing_file_is_made_private_and_undo_leaves_no_trace(client: Client, tmp_path: Path):
    path = client.find_file(tmp_path / "home", {})
    result = write(client, path)
    assert result.changed
    assert result.backup is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert undo(client, path).deleted
    assert not (tmp_path / "home").exists()


@ALL
def test_foreign_entries_stay_and_undo_gives_back_the_very_bytes(client: Client, tmp_path: Path):
    path = present(client, tmp_path)
    path.chmod(0o640)
    before = tree(tmp_path)
    result = write(client, path)
    assert result.backup is not None
    assert result.backup.read_text() == PRESENT[client.name]
    assert "mine" in path.read_text() or client.name in {"cline", "continue"}
    assert "theirs" in path.read_text() or client.name in {"claude", "gemini"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert stat.S_IMODE(result.backup.stat().st_mode) == 0o600
    connection = client.read_back(plain(client, path), {})
    assert connection is not None
    assert (connection.key, connection.model, connection.mode_header) == (TARGET.key, "smollm2", "split")
    assert undo(client, path).is_exact
    assert tree(tmp_path) == before
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@ALL
def test_writing_twice_changes_nothing(client: Client, tmp_path: Path):
    path = present(client, tmp_path)
    write(client, path)
    before = tree(tmp_path)
    again = write(client, path)
    assert again.changed == ()
    assert again.backup is None
    assert tree(tmp_path) == before


@ALL
def test_another_mode_replaces_the_first_and_undo_still_gives_back_the_beginning(client: Client, tmp_path: Path):
    path = present(client, tmp_path)
    write(client, path)
    merged = Target(TARGET.url, TARGET.key, "other", CacheMode.MERGED)
    assert write(client, path, merged).changed
    connection = client.read_back(plain(client, path), {})
    assert connection is not None
    assert (connection.model, connection.mode_header) == ("other", "merged")
    write(client, path, Target(TARGET.url, TARGET.key, "other"))
    connection = client.read_back(plain(client, path), {})
    assert connection is not None
    assert connection.mode_header is None
    assert undo(client, path).is_exact
    assert path.read_text() == PRESENT[client.name]


@ALL
def test_undo_after_a_foreign_change_takes_out_only_what_is_ours(client: Client, tmp_path: Path):
    path = present(client, tmp_path)
    before = plain(client, path)
    write(client, path)
    document = open_document(client.format, path.read_text())
    document.set(("added",), "by others")
    path.write_text(document.text)
    result = undo(client, path)
    assert not result.is_exact
    assert result.left == ()
    assert result.backup is not None
    assert result.backup.exists()
    assert plain(client, path) == {**before, "added": "by others"}
    assert connecting.undo(path, client.format) is None


def test_an_entry_that_others_changed_is_kept_and_said(tmp_path: Path):
    claude = FILE_CLIENTS["claude"]
    path = present(claude, tmp_path)
    write(claude, path)
    settings = plain(claude, path)
    settings["env"]["ANTHROPIC_MODEL"] = "theirs-now"
    settings["env"]["ANTHROPIC_CUSTOM_HEADERS"] += "\nX-More: 2"
    path.write_text(json.dumps(settings))
    result = undo(claude, path)
    assert result.left == (("env", "ANTHROPIC_MODEL"),)
    assert plain(claude, path)["env"] == {
        "MY": "1",
        "ANTHROPIC_API_KEY": "theirs",
        "ANTHROPIC_CUSTOM_HEADERS": "X-Mine: 1\nX-More: 2",
        "ANTHROPIC_MODEL": "theirs-now",
    }


def test_a_provider_that_cline_has_touched_goes_whole(tmp_path: Path):
    """Cline writes a new time into it; half a provider would make it refuse the file."""
    cline = FILE_CLIENTS["cline"]
    path = present(cline, tmp_path)
    write(cline, path)
    settings = plain(cline, path)
    settings["providers"]["openai-compatible"]["updatedAt"] = "2027-01-01T00:00:00.000Z"
    path.write_text(json.dumps(settings, indent=2))
    assert undo(cline, path).left == ()
    assert plain(cline, path) == json.loads(PRESENT["cline"])


def test_a_provider_that_was_pointed_elsewhere_since_is_kept(tmp_path: Path):
    codex = FILE_CLIENTS["codex"]
    path = present(codex, tmp_path)
    write(codex, path)
    path.write_text(path.read_text().replace("http://127.0.0.1:8000/v1", "http://elsewhere/v1"))
    assert undo(codex, path).left == (("model_providers", "kvgate"),)
    assert plain(codex, path)["model_providers"]["kvgate"]["base_url"] == "http://elsewhere/v1"
    assert plain(codex, path)["model"] == "gpt-5"


def test_a_second_write_after_a_foreign_change_makes_a_second_backup(tmp_path: Path):
    codex = FILE_CLIENTS["codex"]
    path = present(codex, tmp_path)
    first = write(codex, path).backup
    path.write_text(path.read_text() + "\n[added]\nby = 1\n")
    second = write(codex, path, Target(TARGET.url, TARGET.key, "other", CacheMode.MERGED)).backup
    assert first is not None
    assert second is not None
    assert first != second
    undo(codex, path)
    assert plain(codex, path) == {**open_document(codex.format, PRESENT["codex"]).plain(), "added": {"by": 1}}


@ALL
def test_a_malformed_file_is_named_and_left_alone(client: Client, tmp_path: Path):
    path = client.find_file(tmp_path, {})
    path.parent.mkdir(parents=True)
    broken = b"\xff\xfe\x00" if client.name == "gemini" else b'{"a": [\n'
    path.write_bytes(broken)
    with pytest.raises(ClientFileError, match=str(path)):
        write(client, path)
    assert tree(tmp_path) == {str(path.relative_to(tmp_path)): broken}


def test_a_link_is_followed_and_stays_a_link(tmp_path: Path):
    claude = FILE_CLIENTS["claude"]
    real = tmp_path / "dotfiles" / "claude.json"
    real.parent.mkdir()
    real.write_text(PRESENT["claude"])
    path = claude.find_file(tmp_path, {})
    path.parent.mkdir()
    path.symlink_to(real)
    result = write(claude, path)
    assert path.is_symlink()
    assert "kvgate" not in str(sorted(real.parent.iterdir()))
    assert result.backup is not None
    assert result.backup.parent == path.parent
    assert "127.0.0.1" in real.read_text()
    assert undo(claude, path).is_exact
    assert real.read_text() == PRESENT["claude"]
    assert path.is_symlink()


def test_a_link_to_nowhere_gets_its_file(tmp_path: Path):
    claude = FILE_CLIENTS["claude"]
    path = claude.find_file(tmp_path, {})
    path.parent.mkdir()
    path.symlink_to(tmp_path / "other" / "claude.json")
    write(claude, path)
    assert (tmp_path / "other" / "claude.json").exists()
    undo(claude, path)
    assert not (tmp_path / "other").exists()


def test_links_in_a_circle_and_folders_are_refused(tmp_path: Path):
    claude = FILE_CLIENTS["claude"]
    path = claude.find_file(tmp_path, {})
    path.parent.mkdir()
    path.symlink_to(path)
    with pytest.raises(ClientFileError, match=r"settings\.json"):
        write(claude, path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ClientFileError, match="is not a file"):
        write(claude, path)


def test_a_file_that_changes_while_it_is_edited_is_left_to_the_other(tmp_path: Path):
    path = tmp_path / "settings.json"
    path.write_text("{}")
    read = files.read(path)
    path.write_text('{"theirs": 1}')
    with pytest.raises(ClientFileError, match="changed by another program"):
        files.replace(read, b'{"ours": 1}')
    assert path.read_text() == '{"theirs": 1}'
    assert os.listdir(tmp_path) == ["settings.json"]


def test_a_damaged_record_stops_undo_and_write(tmp_path: Path):
    claude = FILE_CLIENTS["claude"]
    path = present(claude, tmp_path)
    write(claude, path)
    record = path.with_name(path.name + RECORD_ENDING)
    record.write_text(record.read_text()[:40])
    before = path.read_text()
    with pytest.raises(ClientFileError, match="damaged"):
        undo(claude, path)
    assert path.read_text() == before


def test_the_record_holds_no_key(tmp_path: Path):
    for client in FILE_CLIENTS.values():
        path = client.find_file(tmp_path / client.name, {})
        path.parent.mkdir(parents=True)
        path.write_text(PRESENT[client.name])
        write(client, path)
        record = path.with_name(path.name + RECORD_ENDING)
        assert TARGET.key not in record.read_text()
        assert "theirs" not in record.read_text()
        assert stat.S_IMODE(record.stat().st_mode) == 0o600


def test_line_ends_and_a_byte_order_mark_stay(tmp_path: Path):
    claude = FILE_CLIENTS["claude"]
    path = tmp_path / "settings.json"
    path.write_bytes(b'\xef\xbb\xbf{\r\n  "theme": "dark"\r\n}\r\n')
    write(claude, path)
    data = path.read_bytes()
    assert data.startswith(b'\xef\xbb\xbf{\r\n  "theme": "dark",\r\n  "env": {\r\n')
    assert data.count(b"\n") == data.count(b"\r\n")
    undo(claude, path)
    assert path.read_bytes() == b'\xef\xbb\xbf{\r\n  "theme": "dark"\r\n}\r\n'


@ALL
@pytest.mark.parametrize(
    "change",
    [lambda text: "\ufeff" + text, lambda text: text.replace("\n", "\r\n"), lambda text: text.rstrip("\n")],
    ids=["mark", "crlf", "no last newline"],
)
def test_cf_01_a_file_of_any_editor_is_pointed_here_and_given_back_byte_for_byte(
    client: Client, change: Callable[[str], str], tmp_path: Path
):
    path = client.find_file(tmp_path, {})
    path.parent.mkdir(parents=True)
    before = change(PRESENT[client.name]).encode()
    path.write_bytes(before)

    write(client, path)
    data = path.read_bytes()
    written = open_document(client.format, files.read(path).text).plain()
    assert TARGET.url in client.read_back(written, {}).base_url
    assert data.startswith(b"\xef\xbb\xbf") == before.startswith(b"\xef\xbb\xbf")
    assert data.count(b"\r\n") == (data.count(b"\n") if b"\r\n" in before else 0)

    undo(client, path)
    assert path.read_bytes() == before
