"""`kvgate serve` with a model that can't be there: it ends before it listens, and says what to do."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from backends.models.bundled import BUNDLED
from backends.protocol.model_names import BUNDLED_NAMES, bundled_name, problem_of
from gateway.cli import serve
from gateway.cli.main import main
from gateway.settings.schema import EngineSettings, Settings


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve, "bind_sockets", nothing_is_bound)


def nothing_is_bound(host: str, port: int) -> list[socket.socket]:
    raise AssertionError("it was about to listen")


def absent(path: Path) -> None:
    """Nothing at all."""


def empty_folder(path: Path) -> None:
    path.mkdir()


def folder_of_gguf(path: Path) -> None:
    path.mkdir()
    (path / "a.gguf").write_bytes(b"GGUF")


def text_file(path: Path) -> None:
    path.write_text("no weights")


BAD = [
    (absent, "no such folder or file"),
    (empty_folder, "config.json is missing"),
    (folder_of_gguf, "a.gguf as the model"),
    (text_file, "isn't a GGUF file"),
]


@pytest.mark.parametrize(("make", "said"), BAD)
@pytest.mark.parametrize("by_flag", [True, False])
def test_a_model_that_is_not_there_ends_the_start_and_is_said_with_its_place(
    make: Callable[[Path], None], said: str, by_flag: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    make(tmp_path / "missing")
    if not by_flag:
        (tmp_path / "kvgate.toml").write_text('[engine]\nmodel = "./missing"\n')

    assert main(["serve", *(["--model", "./missing"] if by_flag else [])]) == 1
    output = capsys.readouterr()
    assert output.err.startswith("kvgate: engine.model (--model): ")
    assert said in output.err
    assert str(tmp_path / "missing") in output.err
    assert output.out == ""


def test_a_name_that_is_none_is_answered_with_those_that_are(capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "--model", "smollm3"]) == 1
    said = capsys.readouterr().err
    for words in ("No model is called 'smollm3'", "smollm2", ".gguf", "hub id", "kvgate model pull"):
        assert words in said


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2-135M-Instruct", "someone/some-model", "scripted:delay=0.1"])
def test_what_may_yet_be_fetched_is_no_problem(name: str):
    assert serve.no_model(Settings(engine=EngineSettings(model=name))) is None


def test_an_engine_that_is_off_needs_no_model():
    assert serve.no_model(Settings(engine=EngineSettings(model="./missing", enabled=False))) is None


def test_the_home_of_nobody_is_no_model():
    assert "no such folder or file" in (problem_of("~nobody-of-this-name/model") or "")


def test_every_bundled_model_has_its_names():
    assert [model.name for model in BUNDLED] == list(BUNDLED_NAMES)
    for name, others in BUNDLED_NAMES.items():
        assert {bundled_name(spelling.upper()) for spelling in (name, *others)} == {name}
