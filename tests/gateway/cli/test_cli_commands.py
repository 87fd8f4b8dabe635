"""The command line: help, settings commands, what can be known before anything starts."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tomli

from gateway.cli import main as main_module
from gateway.cli import serve
from gateway.cli.main import COMMANDS, command_module, main

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    for name in ("KVGATE_CONFIG", "KVGATE_SERVER__PORT", "TAOTOKEN_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_summary_that_help_shows(name):
    assert COMMANDS[name] == command_module(name).SUMMARY


def test_help_shows_examples_and_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['kvgate', '--help']\n"
        "from gateway.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'aiohttp', 'pydantic', 'litellm', 'msgspec'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "kvgate serve --upstream" in done.stdout


def test_module_and_version():
    done = subprocess.run([sys.executable, "-m", "gateway", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("kvgate ")


def test_no_command_prints_help_and_fails(capsys):
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().out


def test_config_show_is_a_file_that_means_the_same(capsys, tmp_path, monkeypatch):
    (tmp_path / "kvgate.toml").write_text('[server]\nport = 1\napi_key = "sk-fake-0000"\nmodel = "ü\\"x"\n')
    monkeypatch.setenv("KVGATE_SERVER__PORT", "9000")
    assert main(["config", "show"]) == 0
    output = capsys.readouterr()
    shown = tomli.loads(output.out)
    assert shown["server"]["port"] == 9000
    assert shown["server"]["api_key"] == "***"
    assert shown["server"]["model"] == 'ü"x'
    assert shown["engine"]["model"] == "smollm2"
    assert "notice: server.api_key" in output.err
    assert "sk-fake" not in output.out + output.err


def test_config_show_as_json(capsys):
    assert main(["config", "show", "--json", "--config", str(CONFIGS / "cc-switch.toml")]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["shape"] == "cc-switch"
    assert shown["settings"]["server"]["name"] == "taotoken"
    assert shown["settings"]["engine"] is None
    assert shown["notices"]


def test_config_check_tells_good_from_bad(capsys, tmp_path):
    assert main(["config", "check", str(CONFIGS / "cline-settings.split.json")]) == 0
    assert "good (cline-settings); default mode: split" in capsys.readouterr().out
    (tmp_path / "bad.toml").write_text("[server]\nprot = 1\n[kv_cache]\nblock_size = 0\n")
    assert main(["config", "check", "bad.toml"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].startswith("kvgate: server.prot (bad.toml, line 2)")
    assert errors[1].startswith("kvgate: kv_cache.block_size (bad.toml, line 4)")


def test_serve_with_bad_settings_fails_at_once(capsys, tmp_path):
    assert main(["serve", "--config", str(tmp_path / "none.toml")]) == 1
    assert "does not exist" in capsys.readouterr().err
    assert main(["serve", "--host", "0.0.0.0"]) == 1
    assert "--host (command line)" in capsys.readouterr().err
    assert main(["serve", "--upstream", "taotoken.net", "--port", "x"]) == 1
    errors = capsys.readouterr().err
    assert "--upstream (command line): the URL must start with http" in errors
    assert "--port (command line): must be a whole number" in errors
    assert main(["serve", "--upstream", "http://h", "--upstream-key-env", "FAKE_UNSET"]) == 1
    assert "--upstream-key-env (command line): refers to the environment variable FAKE_UNSET" in capsys.readouterr().err


def test_a_key_in_the_place_of_its_variable_is_refused_and_not_repeated(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--upstream", "http://h", "--upstream-key-env", "sk-fake-123"])
    errors = capsys.readouterr().err
    assert "--upstream-key-env: needs the name of a variable" in errors
    assert "fake" not in errors


MALFORMED = {
    "rest behind a value": (b'mode = "split"xyz\n', "line 1"),
    "empty": (b"", "the file is empty"),
    "twice the same table": (b"[server]\nport = 1\n[server]\n", "line 3"),
    "UTF-16": ("[server]\n".encode("utf-16"), "save it as UTF-8"),
    "a directory": (None, "is a directory"),
}


@pytest.mark.parametrize("command", [["serve", "--config"], ["config", "check"], ["config", "show", "--config"]])
@pytest.mark.parametrize("name", MALFORMED)
def test_cf_03_cf_06_a_malformed_file_ends_the_command_before_anything_starts(
    name: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    content, said = MALFORMED[name]
    path = tmp_path / "bad.toml"
    path.mkdir() if content is None else path.write_bytes(content)
    monkeypatch.setattr(serve, "bind_sockets", nothing_is_bound)

    assert main([*command, str(path)]) == 1
    output = capsys.readouterr()
    assert said in output.err
    assert "bad.toml" in output.err
    assert output.out == ""


def test_cf_03_a_link_to_nowhere_in_the_place_of_the_settings_is_not_taken_for_no_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(serve, "bind_sockets", nothing_is_bound)
    (tmp_path / "kvgate.toml").symlink_to(tmp_path / "gone.toml")

    assert main(["serve"]) == 1
    assert "is a link to a file that does not exist" in capsys.readouterr().err


def nothing_is_bound(host: str, port: int) -> list[socket.socket]:
    raise AssertionError("it was about to listen")


def test_commands_are_all_there_is():
    assert main_module.COMMANDS.keys() >= {"serve", "config", "model"}
    with pytest.raises(SystemExit):
        main(["sevre"])
