"""Other gateways: what is installed where, and how each is started. No pip, no npm, no server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.bench.environments import Missing, is_installed
from gateway.bench.gateways import install, launch
from gateway.bench.gateways.install import LITELLM, PEERS, PORTKEY, VLLM_ROUTER, install_all, install_peer
from gateway.bench.gateways.launch import GatewayLaunch, find_peers, litellm_config, own_settings
from gateway.settings.importers import load_settings

UPSTREAM = "http://127.0.0.1:9999"


class ScriptedCommands:
    """Keeps what was to be run, and leaves the files that matter."""

    def __init__(self):
        self.lines: list[str] = []

    def __call__(self, command):
        self.lines.append(" ".join(command))
        if command[1:3] == ["-m", "venv"]:
            Path(command[-1]).mkdir(parents=True)
            (Path(command[-1]) / "pyvenv.cfg").touch()


@pytest.fixture
def npm(monkeypatch):
    monkeypatch.setattr(install.shutil, "which", lambda name: f"/usr/bin/{name}")


def test_python_gateways_get_environments_of_their_own(tmp_path):
    commands = ScriptedCommands()
    folder = install_peer(LITELLM, tmp_path, commands)

    assert folder == tmp_path / "litellm"
    assert commands.lines[-1].endswith("install -qq litellm[proxy]==1.108.7")
    install_peer(LITELLM, tmp_path, commands)
    assert len(commands.lines) == 2


def test_the_one_from_npm_is_held_to_versions_that_it_works_with(tmp_path, npm):
    commands = ScriptedCommands()
    folder = install_peer(PORTKEY, tmp_path, commands)

    assert commands.lines[0].startswith(f"/usr/bin/npm install --prefix {folder} ")
    package = json.loads((folder / "package.json").read_text())
    assert package["dependencies"] == {"@portkey-ai/gateway": "1.15.2"}
    assert package["overrides"] == {"@hono/node-server": "1.13.8", "@hono/node-ws": "1.2.0"}
    assert is_installed(PORTKEY, folder)
    install_peer(PORTKEY, tmp_path, commands)
    assert len(commands.lines) == 1


def test_an_interrupted_installation_from_npm_begins_anew_and_other_folders_are_left_alone(tmp_path, npm, capsys):
    (tmp_path / "portkey").mkdir()
    (tmp_path / "portkey" / "package.json").write_text("{}")
    (tmp_path / "portkey" / "node_modules").mkdir()
    folder = install_peer(PORTKEY, tmp_path, ScriptedCommands())
    assert not (folder / "node_modules").exists()

    other = tmp_path / "gateways" / "portkey"
    other.mkdir(parents=True)
    (other / "thesis.txt").touch()
    assert install_all(["portkey"], tmp_path, ScriptedCommands()) == 1
    assert (other / "thesis.txt").exists()
    assert "isn't an npm project; it is left alone" in capsys.readouterr().err


def test_without_npm_the_others_are_installed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(install.shutil, "which", lambda name: None)

    assert install_all(list(PEERS), tmp_path, ScriptedCommands()) == 1
    assert is_installed(LITELLM, tmp_path / "gateways" / "litellm")
    assert is_installed(VLLM_ROUTER, tmp_path / "gateways" / "vllm-router")
    assert "portkey: it needs Node.js" in capsys.readouterr().err


def test_a_gateway_that_is_not_there_says_how_to_install_it(tmp_path):
    found = find_peers(tuple(PEERS), tmp_path, tmp_path, UPSTREAM)

    assert [type(peer) for peer in found] == [Missing] * 3
    assert "kvgate bench gateway --install portkey (25 MB)" in found[1].reason
    assert find_peers((), tmp_path, tmp_path, UPSTREAM) == []


def put(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_installed_gateways_are_started_over_the_upstream(tmp_path, monkeypatch):
    monkeypatch.setattr(launch.shutil, "which", lambda name: f"/usr/bin/{name}")
    root = tmp_path / "gateways"
    for name in ("litellm", "vllm-router"):
        put(root / name / "bin" / name)
        put(root / name / "bin" / "python", "#!/bin/sh\necho 9.8.7\n")
    put(root / "portkey" / launch.PORTKEY_SERVER)
    put(root / "portkey" / launch.PORTKEY_SERVER.parents[1] / "package.json", '{"version": "5.4.3"}')
    litellm, portkey, router = find_peers(tuple(PEERS), tmp_path, tmp_path, UPSTREAM)

    assert isinstance(litellm, GatewayLaunch)
    assert litellm.version == "9.8.7"
    assert litellm.command(47)[-2:] == ["--port", "47"]
    assert "--num_workers 1" in " ".join(litellm.command(47))
    config = Path(litellm.command(47)[litellm.command(47).index("--config") + 1])
    assert json.loads(config.read_text()) == litellm_config(UPSTREAM)
    assert isinstance(portkey, GatewayLaunch)
    assert portkey.version == "5.4.3"
    assert portkey.command(47)[-1] == "--port=47"
    assert portkey.headers["x-portkey-custom-host"] == f"{UPSTREAM}/v1"
    assert isinstance(router, GatewayLaunch)
    assert f"--worker-urls {UPSTREAM} " in " ".join(router.command(47))


def test_portkey_without_node_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(launch.shutil, "which", lambda name: None)
    put(tmp_path / "gateways" / "portkey" / launch.PORTKEY_SERVER)

    assert find_peers(("portkey",), tmp_path, tmp_path, UPSTREAM) == [
        Missing("portkey", "it needs Node.js, which is not on PATH")
    ]


def test_the_settings_of_the_own_gateway_have_a_key_and_records_and_no_engine(tmp_path):
    file = tmp_path / "kvgate.toml"
    file.write_text(own_settings(UPSTREAM))
    settings = load_settings(file, environ={}).settings

    assert settings.server.api_base == f"{UPSTREAM}/v1"
    assert settings.engine is None
    assert [key.name for key in settings.keys] == ["bench"]
    assert settings.limits.max_records > 0
    assert settings.limits.max_concurrent_requests >= 500
