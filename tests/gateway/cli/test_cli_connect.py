"""`kvgate connect`: printed, written, taken back; the key is shown only where it has to be."""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from gateway.cli.connect import EXIT_BAD_OPTIONS
from gateway.cli.main import main
from gateway.clients.catalog import FILE_CLIENTS, NAMES

KEY = "sk-key-0123456789"
NOBODY = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def clean_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("KVGATE_CONFIG", "KVGATE_KEY", "CODEX_HOME", "CLAUDE_CONFIG_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def gateway() -> Iterator[str]:
    """Lists one model of 32768 tokens, for the right key alone."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            good = self.headers["Authorization"] == f"Bearer {KEY}" and self.path == "/v1/models"
            body = json.dumps({"data": [{"id": "big", "max_model_len": 32768}]} if good else {}).encode()
            self.send_response(200 if good else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("name", NAMES)
def test_printing_writes_nothing_and_shows_no_real_key(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["connect", name, "--mode", "pd", "--url", NOBODY, "--key", KEY]) == 0
    output = capsys.readouterr()
    assert "split" in output.out
    assert KEY not in output.out + output.err
    assert "no gateway answers" in output.err
    assert list(tmp_path.iterdir()) == []
    assert main(["connect", name, "--mode", "split", "--url", NOBODY, "--key", KEY, "--show-key"]) == 0
    assert KEY in capsys.readouterr().out or name == "cc-switch"


@pytest.mark.parametrize("name", FILE_CLIENTS)
def test_what_is_printed_is_a_file_that_points_here(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["connect", name, "--mode", "split", "--url", NOBODY, "--model", "m"]) == 0
    client = FILE_CLIENTS[name]
    path = client.find_file(tmp_path, {})
    path.parent.mkdir(parents=True)
    path.write_text(capsys.readouterr().out)
    assert main(["connect", name, "--mode", "split", "--url", NOBODY, "--model", "m", "--write"]) == 0
    assert "nothing was changed" in capsys.readouterr().out


def test_written_with_limits_of_the_running_gateway_and_undone(
    gateway: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "kvgate.toml").write_text(f'[[keys]]\nname = "me"\nkey = "{KEY}"\n')
    assert main(["connect", "cline", "--mode", "split", "--url", gateway, "--write"]) == 0
    output = capsys.readouterr()
    assert "undo: kvgate connect cline --undo" in output.out
    assert KEY not in output.out + output.err
    path = tmp_path / ".cline/data/settings/providers.json"
    settings = json.loads(path.read_text())["providers"]["openai-compatible"]["settings"]
    assert settings["apiKey"] == KEY
    assert settings["baseUrl"] == f"{gateway}/v1"
    assert (settings["model"], settings["contextWindow"], settings["maxTokens"]) == ("big", 32768, 4096)
    assert main(["connect", "cline", "--undo"]) == 0
    assert "is gone again" in capsys.readouterr().out
    assert not (tmp_path / ".cline").exists()
    assert main(["connect", "cline", "--undo"]) == 0
    assert "nothing to undo" in capsys.readouterr().out


def test_a_wrong_key_is_said(gateway: str, capsys: pytest.CaptureFixture[str]):
    assert main(["connect", "claude", "--url", gateway, "--key", "sk-wrong"]) == 0
    assert "is the key right?" in capsys.readouterr().err


def test_another_home_is_worked_in_and_the_environments_folders_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("CODEX_HOME", str(tmp_path / "elsewhere"))
    assert main(["connect", "codex", "--home", str(tmp_path / "h"), "--url", NOBODY, "--write"]) == 0
    assert (tmp_path / "h/.codex/config.toml").exists()
    assert not (tmp_path / "elsewhere").exists()
    assert main(["connect", "codex", "--url", NOBODY, "--write"]) == 0
    assert (tmp_path / "elsewhere/config.toml").exists()
    capsys.readouterr()


def test_the_next_step_is_told_with_the_options_that_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    home = tmp_path / "a home"
    place = ["--home", str(home)]
    what = ["--mode", "split", "--url", NOBODY, "--model", "m", "--max-output", "9"]
    assert main(["connect", "codex", *what, *place, "--key", KEY]) == 0
    told = next(line for line in capsys.readouterr().err.splitlines() if "or run: " in line)
    assert KEY not in told
    command = shlex.split(told.partition("or run: ")[2])
    assert command == ["kvgate", "connect", "codex", *what, *place, "--key", "KEY", "--write"]

    assert main(command[1:]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    undo = next(line.removeprefix("undo: kvgate ") for line in lines if line.startswith("undo: "))
    assert any(f"kvgate doctor --client codex --home '{home}' tries it" in line for line in lines)
    assert main(shlex.split(undo)) == 0
    assert not (home / ".codex").exists()


def test_json_says_file_text_mode_and_notes(capsys: pytest.CaptureFixture[str]):
    assert main(["connect", "claude", "--mode", "merged", "--url", NOBODY, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["client"], shown["mode"], shown["limits"]) == ("claude", "merged", {"context": 8192, "output": 2048})
    assert "ANTHROPIC_BASE_URL" in shown["text"]
    assert any("max_model_len" in note for note in shown["notes"])
    assert main(["connect", "claude", "--url", NOBODY, "--json", "--write"]) == 0
    assert "env.ANTHROPIC_MODEL" in json.loads(capsys.readouterr().out)["changed"]
    assert main(["connect", "claude", "--json", "--undo"]) == 0
    assert json.loads(capsys.readouterr().out)["exact"] is True
    assert main(["connect", "cc-switch", "--url", NOBODY, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["lines"]) == 4


def test_a_malformed_file_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / ".claude/settings.json"
    path.parent.mkdir()
    path.write_text('{"env": ')
    assert main(["connect", "claude", "--url", NOBODY, "--write"]) == 1
    assert f"{path}: line 1" in capsys.readouterr().err
    assert path.read_text() == '{"env": '
    assert main(["connect", "claude", "--url", NOBODY]) == 0
    assert f"note: {path}: line 1" in capsys.readouterr().err


def test_a_file_with_a_real_key_that_others_can_read_is_remarked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / ".codex/config.toml"
    path.parent.mkdir()
    path.write_text("# mine\n")
    path.chmod(0o644)
    assert main(["connect", "codex", "--url", NOBODY, "--key", KEY, "--write"]) == 0
    assert f"chmod 600 {path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cline", "--mode", "fast"], "must be merged"),
        (["cline", "--url", "localhost"], "--url"),
        (["cline", "--key", "two words", "--url", NOBODY], "one word"),
        (["curl", "--write"], "no settings file"),
        (["cc-switch", "--undo"], "open the link"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    assert main(["connect", *arguments]) == EXIT_BAD_OPTIONS
    assert words in capsys.readouterr().err


def test_unknown_clients_and_write_with_undo_are_refused(capsys: pytest.CaptureFixture[str]):
    for arguments in (["vim"], ["cline", "--write", "--undo"]):
        with pytest.raises(SystemExit):
            main(["connect", *arguments])
    assert "invalid choice" in capsys.readouterr().err


def test_bad_settings_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "kvgate.toml").write_text("[server]\nprot = 1\n")
    assert main(["connect", "cline"]) == 1
    assert "server.prot" in capsys.readouterr().err
