"""Packed weights in a file: the same answers as without, written once, and never a reason not to start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from model_helpers import DENSE, Driver, make_folder, make_prompts
from safetensors.torch import load_file, save_file
from test_load_model import add_own_values

from backends.models.base import LoadedModel
from backends.models.cli import main
from backends.models.loader import load_model
from backends.models.native_step import StepUnavailable, make_native_step
from backends.models.packed_files import MAX_FILES, MIN_FREE_BYTES, packed_files, writing
from backends.models.packed_weights import SOURCES, PackedStore
from backends.models.spec import ModelLoadError
from backends.native import library
from backends.worker.kv_cache import PagedKVCache
from backends.worker.mappings import report

PROMPTS = make_prompts(30, 7)


@pytest.fixture
def store(tmp_path: Path) -> PackedStore:
    return PackedStore(tmp_path / "weights", min_model_bytes=0)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Values of its own in 4 and 8 bits, a tied head, sizes that the kernels take."""
    folder = make_folder(tmp_path_factory.mktemp("llama"), "Llama", {"tie_word_embeddings": True})
    add_own_values(folder)
    return folder


def no_files(folder: Path) -> PackedStore:
    return PackedStore(folder, min_model_bytes=sys.maxsize)


def answers(loaded: LoadedModel) -> list[list[list[int]]]:
    """By chunks, and by the compiled decode step where there is one."""
    ways = [Driver(loaded).run(PROMPTS, 6, chunk=9)]
    try:
        make_native_step(loaded, PagedKVCache.allocate(loaded.spec, 1, 16).tensor)
    except StepUnavailable:
        return ways
    return [*ways, Driver(loaded, compiled=True).run(PROMPTS, 6, chunk=1)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


# ---------------------------------------------------------------------------------------------------- same answers


@pytest.mark.parametrize("weight_dtype", ["auto", "fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_weight_format_answers_the_same_from_a_file(
    llama: Path, store: PackedStore, dtype: str, weight_dtype: str
) -> None:
    def load(store: PackedStore) -> LoadedModel:
        return load_model(llama, dtype=dtype, weight_dtype=weight_dtype, store=store)

    own, first, second = load(no_files(store.folder)), load(store), load(store)
    assert len(packed_files(store.folder)) == 1
    assert own.spec == first.spec == second.spec
    assert answers(own) == answers(first) == answers(second)


@pytest.mark.parametrize("name", ["llama-biased", "qwen2-sliding", "qwen3", "mistral-sliding"])
@pytest.mark.parametrize("native", [True, False])
def test_every_family_answers_the_same_from_a_file(
    tmp_path: Path, store: PackedStore, name: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "available", lambda: native and library.loaded_from() is not None)
    folder = make_folder(tmp_path / "model", *DENSE[name])
    for weight_dtype in ("auto", "int4"):
        own = load_model(folder, dtype="bf16", weight_dtype=weight_dtype, store=no_files(store.folder))
        load_model(folder, dtype="bf16", weight_dtype=weight_dtype, store=store)
        mapped = load_model(folder, dtype="bf16", weight_dtype=weight_dtype, store=store)
        assert own.spec.notices == mapped.spec.notices
        assert Driver(own).run(PROMPTS, 6, chunk=9) == Driver(mapped).run(PROMPTS, 6, chunk=9)


def test_a_mapped_model_has_no_weights_of_its_own(llama: Path, store: PackedStore) -> None:
    weights: Any = load_model(llama, dtype="bf16", store=store).model
    weights = weights.weights
    tensors = [weights.embedding, weights.norm, weights.head.many_rows.weight]
    tensors += [layer.qkv.many_rows.weight for layer in weights.layers]
    if library.available():
        tensors += [weights.head.packed.data, *(layer.down.packed.data for layer in weights.layers)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1  # all in one mapping
    assert weights.head.many_rows.weight is weights.embedding


@pytest.mark.skipif(not library.available(), reason="needs the compiled kernels")
def test_the_copy_for_decode_steps_is_in_the_file_too(llama: Path, store: PackedStore) -> None:
    weights: Any = load_model(llama, dtype="fp32", store=store).model
    layer = weights.weights.layers[0]
    storages = {tensor.untyped_storage().data_ptr() for tensor in (layer.qkv.weight, layer.qkv.step_form.data)}
    assert len(storages) == 1


# ---------------------------------------------------------------------------------------------------- written once


def never(for_file: bool) -> Any:
    raise AssertionError("packed again")


def parts_of(value: float) -> Callable[[bool], Any]:
    return lambda for_file: [("weight", torch.full((4,), value))]


CHOICE = {"dtype": "bf16", "weight_dtype": "int4"}


def test_a_second_start_packs_nothing(llama: Path, store: PackedStore) -> None:
    store.load(llama, CHOICE, parts_of(1.0))
    again = store.load(llama, CHOICE, never)
    assert again.parts["weight"].tolist() == [1.0] * 4
    assert again.notices == ()


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {here!r}]
from model_helpers import Driver, make_prompts
from backends.models import dense_loader
from backends.models.loader import load_model
from backends.models.packed_weights import PackedStore

parts = dense_loader._parts

def counted(*args, **kwargs):
    print("packs", flush=True)
    return parts(*args, **kwargs)

dense_loader._parts = counted
print("imported", flush=True)
sys.stdin.readline()
loaded = load_model(Path({model!r}), dtype="bf16", store=PackedStore(Path({folder!r}), min_model_bytes=0))
Driver(loaded).run(make_prompts(30), 3, chunk=30)
print(loaded.spec.notices, flush=True)
sys.stdin.readline()
"""


@contextmanager
def two_processes(model: Path, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Both have imported everything and are waiting for a line to go on."""
    here = Path(__file__).parent
    script = SCRIPT.format(tests=str(here.parents[1]), here=str(here), model=str(model), folder=str(folder))
    command = [sys.executable, "-c", script]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, cwd=here.parents[2], **pipes) for _ in range(2)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def lines_until(process: subprocess.Popen[str], last: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    while not lines or lines[-1] != last:
        line = process.stdout.readline()
        assert line, "the process has ended"
        lines.append(line.strip())
    return lines


def test_two_processes_that_start_at_once_pack_once_and_hold_one_copy(llama: Path, store: PackedStore) -> None:
    with two_processes(llama, store.folder) as processes:
        for process in processes:
            lines_until(process, "imported")
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        said = [lines_until(process, "()") for process in processes]  # "()": they have no notices
        assert sorted(len(lines) for lines in said) == [1, 2]  # one packed
        assert len(names(store.folder)) == 1
        if sys.platform == "linux":
            pids = [process.pid for process in processes]
            one, both = report(pids[:1], store.folder), report(pids, store.folder)
            assert both.together.weights.pss <= 1.35 * one.together.weights.rss
            assert one.together.weights.rss > 100_000


@pytest.mark.parametrize("damage", [b"", b"not at all one of ours" * 9, None])
def test_a_damaged_file_is_made_again(llama: Path, store: PackedStore, damage: bytes | None) -> None:
    store.load(llama, CHOICE, parts_of(1.0))
    [file] = packed_files(store.folder)
    file.path.write_bytes(file.path.read_bytes()[:-1] if damage is None else damage)
    assert store.load(llama, CHOICE, parts_of(2.0)).parts["weight"][0] == 2.0
    assert store.load(llama, CHOICE, never).notices == ()


def test_what_a_killed_writer_left_is_removed(llama: Path, store: PackedStore) -> None:
    store.folder.mkdir()
    (store.folder / "other-0123.weights.partial").write_bytes(b"half")
    store.load(llama, CHOICE, parts_of(1.0))
    assert len(names(store.folder)) == 1


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "a.weights"

    def write_half() -> None:
        with writing(target) as file:
            file.write(b"half")
            assert not target.exists()
            raise ModelLoadError("stop")

    with pytest.raises(ModelLoadError, match="stop"):
        write_half()
    assert names(tmp_path) == []


def test_a_model_that_is_refused_leaves_no_file(tmp_path: Path, store: PackedStore) -> None:
    folder = make_folder(tmp_path / "model", "Llama", {})
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.0.extra.weight": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"extra\.weight"):
        load_model(folder, dtype="fp32", store=store)
    assert names(store.folder) == []


# ------------------------------------------------------------------------------------------- what isn't kept, and why


def test_a_model_changed_in_place_is_packed_again_and_its_old_file_goes(tmp_path: Path, store: PackedStore) -> None:
    folder = make_folder(tmp_path / "model", "Llama", {})
    before = load_model(folder, dtype="fp32", store=store)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * -2
    save_file(tensors, path, metadata={"format": "pt"})
    after = load_model(folder, dtype="fp32", store=store)
    assert len(packed_files(store.folder)) == 1
    old, new = (Driver(loaded).run(PROMPTS, 6, chunk=9) for loaded in (before, after))
    assert new == Driver(load_model(folder, dtype="fp32", store=no_files(tmp_path))).run(PROMPTS, 6, chunk=9)
    assert old != new  # and who had the old file mapped still computes with it


def test_the_same_choice_packed_in_another_way_replaces_the_file(llama: Path, store: PackedStore) -> None:
    store.load(llama, CHOICE | {"plan": "with kernels"}, parts_of(1.0))
    store.load(llama, CHOICE | {"plan": "without"}, parts_of(2.0))
    store.load(llama, CHOICE | {"weight_dtype": "int8"}, parts_of(3.0))
    found = sorted(file.facts["weight_dtype"] + file.facts.get("plan", "") for file in packed_files(store.folder))
    assert found == ["int4without", "int8"]


def test_the_longest_unused_files_make_room(llama: Path, store: PackedStore) -> None:
    for number in range(MAX_FILES):
        store.load(llama, CHOICE | {"weight_dtype": f"int{number}"}, parts_of(number))
    for age, file in enumerate(sorted(packed_files(store.folder), key=lambda file: file.facts["weight_dtype"])):
        os.utime(file.path, (1000 - age, 1000 - age))  # the last written is the oldest
    store.load(llama, CHOICE | {"weight_dtype": f"int{MAX_FILES - 1}"}, never)  # but now it is used
    store.load(llama, CHOICE | {"weight_dtype": "new"}, parts_of(9.0))
    kept = {file.facts["weight_dtype"] for file in packed_files(store.folder)}
    assert kept == {"new", f"int{MAX_FILES - 1}", "int0", "int1"}


def test_files_of_a_model_that_is_gone_go_too(tmp_path: Path, llama: Path, store: PackedStore) -> None:
    folder = make_folder(tmp_path / "model", "Llama", {})
    store.load(folder, CHOICE, parts_of(1.0))
    folder.rename(tmp_path / "elsewhere")
    store.load(llama, CHOICE, parts_of(2.0))
    assert [file.facts["folder"] for file in packed_files(store.folder)] == [str(llama)]


def test_small_models_get_no_file_and_no_notice(tmp_path: Path, llama: Path) -> None:
    loaded = load_model(llama, dtype="bf16", store=PackedStore(tmp_path / "weights"))
    assert loaded.spec.notices == ()
    assert not (tmp_path / "weights").exists()


# --------------------------------------------------------------------------------------------------- no file to be had


def check_own_copy(model: Path, store: PackedStore, reason: str) -> None:
    loaded = load_model(model, dtype="bf16", store=store)
    [notice] = loaded.spec.notices
    assert "own copy" in notice
    assert reason in notice
    expected = load_model(model, dtype="bf16", store=no_files(store.folder))
    assert answers(loaded) == answers(expected)


def test_where_the_cache_cannot_be_written_the_weights_are_the_process_own(tmp_path: Path, llama: Path) -> None:
    (tmp_path / "file").write_text("")
    check_own_copy(llama, PackedStore(tmp_path / "file" / "weights", min_model_bytes=0), "Not a directory")


def test_a_disk_that_would_be_full_is_left_alone(tmp_path: Path, llama: Path) -> None:
    room = iter([MIN_FREE_BYTES + 2**20] * 5)  # it gets full while the file is written
    store = PackedStore(tmp_path / "weights", min_model_bytes=0, free_bytes=lambda folder: next(room, MIN_FREE_BYTES))
    check_own_copy(llama, store, "would stay free on the disk")
    assert names(store.folder) == []


def test_files_can_be_switched_off(llama: Path, store: PackedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGATE_WEIGHT_FILES", "0")
    check_own_copy(llama, store, "KVGATE_WEIGHT_FILES=0")


def test_a_cache_that_can_only_be_read_is_used(llama: Path, store: PackedStore) -> None:
    store.load(llama, CHOICE, parts_of(1.0))
    (store.folder / ".lock").unlink()
    (store.folder / ".lock").mkdir()  # whoever wants to write fails, as root too
    assert store.load(llama, CHOICE, never).notices == ()
    [notice] = store.load(llama, CHOICE | {"dtype": "fp32"}, parts_of(2.0)).notices
    assert "own copy" in notice


def test_what_decides_the_layout_is_part_of_a_files_name() -> None:
    folder = Path(library.__file__).parents[1] / "models"
    assert all((folder / name).is_file() for name in SOURCES)


# ----------------------------------------------------------------------------------------------------------- command


def test_the_command_lists_and_removes_them(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVGATE_CACHE_DIR", str(tmp_path))
    mapped = PackedStore(tmp_path / "weights", min_model_bytes=0).load(llama, CHOICE, parts_of(1.0))
    assert main(["packed"]) == 0
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split()[:3] == ["MODEL", "ACTIVATIONS", "WEIGHTS"]
    assert line.split()[:3] == [llama.name, "bf16", "int4"]
    assert main(["packed", "--json"]) == 0
    assert f'"model": "{llama.name}"' in capsys.readouterr().out
    assert main(["packed", "--remove"]) == 0
    assert "removed 1 files" in capsys.readouterr().out
    assert names(tmp_path / "weights") == []
    assert mapped.parts["weight"].tolist() == [1.0] * 4  # whoever uses it keeps it
