"""`kvgate doctor`: findings as text and JSON, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.cli.doctor import lines_of
from gateway.cli.main import main
from gateway.doctor.finding import ok, problem

NOBODY = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def clean_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("KVGATE_CONFIG", "KVGATE_KEY", "CLAUDE_CONFIG_DIR", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_nobody_there_is_a_problem_with_what_to_do(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--url", NOBODY]) == 1
    output = capsys.readouterr().out
    assert output.startswith(f"problem  nothing answers at {NOBODY}")
    assert "kvgate serve" in output


def test_settings_are_examined_without_a_gateway(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "kvgate.toml").write_text("[cache_layout]\nchunk_size = 500\n[server]\nport = 1\n")
    assert main(["doctor", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] is False
    assert [one["level"] for one in shown["findings"]] == ["warning", "problem"]
    assert "512 is used" in shown["findings"][0]["what"]
    (tmp_path / "kvgate.toml").write_text("[server]\nprot = 1\n")
    assert main(["doctor", "--url", NOBODY]) == 1
    assert "settings: server.prot" in capsys.readouterr().out


def test_a_client_without_settings_is_told_how_to_get_them(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--client", "claude"]) == 1
    assert "do:  kvgate connect claude --write" in capsys.readouterr().out


def test_a_malformed_settings_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / ".claude/settings.json"
    path.parent.mkdir()
    path.write_text('{"env": ')
    assert main(["doctor", "--client", "claude"]) == 1
    assert f"problem  {path}: line 1" in capsys.readouterr().out


def test_what_connect_wrote_is_read_back(capsys: pytest.CaptureFixture[str]):
    key = "sk-key-0123456789"
    assert main(["connect", "claude", "--url", NOBODY, "--mode", "merged", "--key", key, "--write"]) == 0
    capsys.readouterr()
    assert main(["doctor", "--client", "claude", "--mode", "split"]) == 1
    output = capsys.readouterr().out
    assert f"ok       Claude Code is configured with {NOBODY}, model smollm2, a key" in output
    assert "problem  Claude Code sends the mode merged, not split" in output
    assert f"problem  nothing answers at {NOBODY}" in output
    assert key not in output


@pytest.mark.parametrize("name", ["cc-switch", "curl"])
def test_clients_without_a_file_are_examined_by_what_is_printed_for_them(name: str, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--client", name, "--url", NOBODY]) == 1
    assert "nothing answers" in capsys.readouterr().out


def test_bad_options_are_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--mode", "fast"]) == 2
    assert main(["doctor", "--url", "localhost"]) == 2
    assert "--url" in capsys.readouterr().err


def test_a_finding_is_up_to_three_lines():
    assert lines_of(ok("good")) == ["ok       good"]
    assert lines_of(problem("bad", "since", "do it")) == [
        "problem  bad",
        "         why: since",
        "         do:  do it",
    ]
