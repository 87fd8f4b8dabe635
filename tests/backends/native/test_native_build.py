"""Compiling the kernels: once, in the user's cache, and a clear reason where it can't be done."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backends.native import build
from backends.native.build import BuildFailed, library_path


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVGATE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("KVGATE_NATIVE", raising=False)
    return tmp_path / "native"


def script(folder: Path, text: str) -> str:
    """A stand-in for a compiler."""
    path = folder / "compiler"
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def test_a_compiler_that_fails_is_named_with_its_first_line(
    fresh_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CC", script(tmp_path, "echo 'kernels.c:1: no such thing' >&2; echo more >&2; exit 1"))

    with pytest.raises(BuildFailed, match="no such thing"):
        library_path()
    assert [path.name for path in fresh_cache.iterdir()] == [".lock"]


def test_without_openmp_the_kernels_are_built_for_one_thread(
    fresh_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    works = 'for a in "$@"; do [ "$a" = -fopenmp ] && exit 1; [ "$last" = -o ] && echo lib > "$a"; last=$a; done'
    monkeypatch.setenv("CC", script(tmp_path, works))

    assert library_path().read_text() == "lib\n"


def test_starts_at_the_same_time_compile_once(fresh_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = 'for a in "$@"; do [ "$last" = -o ] && echo lib > "$a"; last=$a; done'
    monkeypatch.setenv("CC", script(tmp_path, f"echo built >> {tmp_path}/count; sleep 0.2; {made}"))
    with ThreadPoolExecutor(3) as pool:
        paths = {future.result() for future in [pool.submit(library_path) for _ in range(3)]}

    assert len(paths) == 1
    assert (tmp_path / "count").read_text() == "built\n"


def test_a_library_is_built_once_and_again_for_another_compiler(
    fresh_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    counting = f'echo built >> {tmp_path}/count; for a in "$@"; do [ "$last" = -o ] && echo lib > "$a"; last=$a; done'
    monkeypatch.setenv("CC", script(tmp_path, counting))
    first = library_path()
    assert library_path() == first
    monkeypatch.setenv("CC", script(tmp_path, counting + "\n# another"))
    assert library_path() != first
    assert (tmp_path / "count").read_text() == "built\n" * 2


def test_no_compiler_and_a_switch_are_reasons(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(BuildFailed, match="no C compiler"):
        library_path()
    monkeypatch.setenv("KVGATE_NATIVE", "0")
    with pytest.raises(BuildFailed, match="KVGATE_NATIVE"):
        library_path()


def test_the_command_never_fails_a_set_up(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("KVGATE_NATIVE", "0")

    assert build.main() == 0
    assert "slower" in capsys.readouterr().err
