"""Files of tensors: what comes back is what was written, and nothing but a whole file comes back at all."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backends.attention.base import AttentionParams
from backends.models.linear import PlainLinear
from backends.models.tensor_file import DTYPES, map_parts, write_parts
from backends.models.tensor_header import ALIGNMENT, START_BYTES, UnusableFile, read_facts

FACTS = {"folder": "/models/a", "content": "1"}


def write(path: Path, **parts: Any) -> Path:
    with path.open("wb") as file:
        write_parts(file, FACTS, parts.items(), lambda num_bytes: None)
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tensors") / "file", weight=torch.arange(20.0), name="head")


@given(
    dtype=st.sampled_from(list(DTYPES.values())),
    shape=st.lists(st.integers(0, 5), max_size=3),
    transposed=st.booleans(),
)
@settings(max_examples=40, derandomize=True, deadline=None)
def test_tensors_come_back_with_type_shape_and_bits(
    tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype, shape: list[int], transposed: bool
) -> None:
    tensor = torch.randint(0, 99, shape).to(dtype)
    tensor = tensor.T if transposed and tensor.dim() == 2 else tensor
    path = write(tmp_path_factory.mktemp("one") / "file", a=tensor, b=torch.ones(3))
    parts = map_parts(path, FACTS)
    assert parts["a"].dtype == dtype
    assert parts["a"].shape == tensor.shape
    assert torch.equal(parts["a"], tensor)
    assert torch.equal(parts["b"], torch.ones(3))


def test_objects_come_back_equal(tmp_path: Path) -> None:
    params = AttentionParams(0.125, 9, None, key_sizes=torch.ones(2, 8))
    parts = map_parts(write(tmp_path / "file", both=(params, ("text", 3, None, True))), FACTS)
    found, plain = parts["both"]
    assert (found.scale, found.sliding_window, found.softcap) == (0.125, 9, None)
    assert torch.equal(found.key_sizes, params.key_sizes)
    assert plain == ("text", 3, None, True)


def test_every_tensor_begins_at_a_page(tmp_path: Path) -> None:
    parts = map_parts(write(tmp_path / "file", many=tuple(torch.ones(size) for size in (1, 5000, 7))), FACTS)
    assert [tensor.data_ptr() % ALIGNMENT for tensor in parts["many"]] == [0, 0, 0]


def test_a_tensor_of_two_parts_is_written_once(tmp_path: Path) -> None:
    embedding = torch.ones(100, 1000)
    path = write(tmp_path / "file", embedding=embedding, head=PlainLinear(embedding))
    assert path.stat().st_size < 1.5 * embedding.numel() * 4
    parts = map_parts(path, FACTS)
    assert parts["head"].weight is parts["embedding"]


def test_parts_are_let_go_one_after_the_other(tmp_path: Path) -> None:
    """Their memory is used again, so that only one of them is held; two that look alike aren't mistaken for one."""

    def parts() -> Any:
        for number in range(50):
            yield f"{number}", torch.full((1000,), float(number))

    with (tmp_path / "file").open("wb") as file:
        write_parts(file, FACTS, parts(), lambda num_bytes: None)
    read = map_parts(tmp_path / "file", FACTS)
    assert [read[f"{number}"][0].item() for number in range(50)] == list(range(50))


def test_pages_are_mapped_shared_and_read_only(written: Path) -> None:
    tensor: Tensor = map_parts(written, FACTS)["weight"]
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux says how memory is mapped")
    for line in maps.read_text().splitlines():
        begin, end = (int(address, 16) for address in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            assert (line.split()[1], line.split()[-1]) == ("r--s", str(written))
            return
    pytest.fail("the tensor is in no mapping")


def test_a_file_with_other_facts_is_not_used(written: Path) -> None:
    with pytest.raises(UnusableFile, match="another model"):
        map_parts(written, FACTS | {"content": "2"})


@given(data=st.data())
@settings(max_examples=60, derandomize=True, deadline=None)
def test_a_torn_file_is_not_used(written: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = written.read_bytes()
    torn = tmp_path_factory.mktemp("torn") / "file"
    torn.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))] + b"x" * data.draw(st.integers(0, 2)) * 3)
    if torn.read_bytes() == content:
        return
    with pytest.raises(UnusableFile):
        map_parts(torn, FACTS)
    assert read_facts(torn) is None


@given(data=st.data())
@settings(max_examples=80, derandomize=True, deadline=None)
def test_a_damaged_header_is_noticed(
    written: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(written.read_bytes())
    unused = range(12, 16)  # in the start, between the format and the length
    header = range(content.rindex(b'{"facts"'), len(content))
    places = [place for place in (*range(START_BYTES), *header) if place not in unused]
    content[data.draw(st.sampled_from(places))] ^= data.draw(st.integers(1, 255))
    damaged = tmp_path_factory.mktemp("damaged") / "file"
    damaged.write_bytes(content)
    with pytest.raises(UnusableFile):
        map_parts(damaged, FACTS)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"x" * 10_000])
def test_a_foreign_file_is_not_used(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UnusableFile, match="isn't a file of tensors"):
        map_parts(tmp_path / "file", FACTS)


def test_room_is_asked_for_before_it_is_taken(tmp_path: Path) -> None:
    asked: list[int] = []

    def reserve(num_bytes: int) -> None:
        asked.append(num_bytes)
        if len(asked) == 2:
            raise OSError(errno.ENOSPC, "full")

    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="full"):
        write_parts(file, FACTS, [("a", torch.ones(4)), ("b", torch.ones(2))], reserve)
    assert asked == [16, 8]
    assert read_facts(tmp_path / "file") is None


def test_what_has_no_form_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="object has no form"):
        write(tmp_path / "file", part=object())
