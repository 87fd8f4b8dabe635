"""Whatever way a mode is asked for at start, that mode is the one in effect, and everything says so."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import serve
from gateway.core.types import CacheMode
from gateway.settings.importers import LoadedSettings, load_settings

SPELLINGS = {"merged": "merged", "chunked": "merged", "split": "split", "disaggregated": "split", "PD": "split"}
PLACES = {
    "engine": "[engine]\n[cache_layout]\nprefill_gpus = [0]\ndecode_gpus = [1, 2]\n",
    "upstream": '[server]\napi_base = "https://taotoken.net/api"\n',
    "both": '[server]\napi_base = "https://taotoken.net/api"\n[engine]\nmodes = ["merged"]\n',
}
ENGINE_SPLIT = "bundled engine: 1 prefill + 2 decode, KV by local, transfer by layer"
TOLD = "told to upstream by X-Cache-Mode"
KINDS = {
    "engine": {"merged": "bundled engine: 1 merged", "split": ENGINE_SPLIT},
    "upstream": {"merged": TOLD, "split": TOLD},
    "both": {"merged": "bundled engine: 1 merged", "split": TOLD},
}


def load(channel: str, spelling: str, place: str, folder: Path) -> LoadedSettings:
    """Settings with a mode by one channel; the file below it says the other mode."""
    other = "split" if SPELLINGS[spelling] == "merged" else "merged"
    in_file = spelling if channel == "file" else other
    text = PLACES[place]
    mode = f'mode = "{in_file}"\n'
    path = folder / "kvgate.toml"
    path.write_text(text + mode if "[cache_layout]" in text else f"{text}[cache_layout]\n{mode}")
    flags: dict[str, Any] = serve.flags_of(_arguments(mode=spelling if channel == "flag" else None))
    environ = {"KVGATE_CACHE_LAYOUT__MODE": spelling} if channel == "environment" else {}
    return load_settings(path, environ=environ, flags=flags)


def _arguments(mode: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    return parser.parse_args(["serve", *(["--mode", mode] if mode else [])])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("channel", ["flag", "environment", "file"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_pd_13_the_mode_that_was_asked_for_is_in_effect_and_its_kind_is_logged(
    tmp_path: Path, spelling: str, channel: str, place: str
):
    settings = load(channel, spelling, place, tmp_path).settings
    mode = SPELLINGS[spelling]

    assert settings.cache_layout.mode == mode
    assert f"default mode: {mode} |" in serve.start_line(settings, "http://u", "file")
    assert serve.mode_lines(settings) == [
        f"mode {name}{' (default)' if name == mode else ''}: {kind}" for name, kind in KINDS[place].items()
    ]


def test_pd_13_a_mode_that_nothing_serves_is_said_not_to_be_served(tmp_path: Path):
    path = tmp_path / "kvgate.toml"
    path.write_text('[engine]\nmodes = ["split"]\n[cache_layout]\nmode = "split"\n')
    settings = load_settings(path, environ={}).settings

    assert serve.mode_lines(settings)[0] == "mode merged: not served"
    assert settings.cache_layout.mode is CacheMode.SPLIT


def test_more_instances_than_cores_end_the_start_with_the_options_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "kvgate.toml"
    path.write_text(f'[engine]\nmodel = "scripted"\n[cache_layout]\ndecode_gpus = {list(range(1000))}\n')

    assert serve.too_many_instances(load_settings(path, environ={}).settings)
    assert _serve(path) == 1
    assert (
        "kvgate: cache_layout.decode_gpus: 1000 decode, 1 prefill instances need a core each" in capsys.readouterr().err
    )


def _serve(path: Path) -> int:
    from gateway.cli.main import main

    return main(["serve", "--config", str(path), "--port", "0"])


def test_a_transfer_backend_that_is_not_installed_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    settings = load_settings(None, environ={"KVGATE_TRANSFER__BACKEND": "nixl"}).settings
    absent = {"nixl_cu12", "nixl_cu13"}
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name in absent else object())
    assert "pip install 'kvgate[nixl]', or use backend local" in (serve.missing_engine(settings) or "")
    absent.remove("nixl_cu12")
    assert serve.missing_engine(settings) is None
