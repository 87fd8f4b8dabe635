"""Which rows compiled code takes: the search for the crossing, what is remembered of it, and who is told."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import make_folder

from backends.models.base import LoadedModel
from backends.models.dense import DenseModel
from backends.models.linear import KernelLinear
from backends.models.loader import load_model
from backends.models.native_step import make_native_step
from backends.models.row_choice import (
    PRODUCT_ROWS,
    REPEATS,
    STEP_ROWS,
    RowLimits,
    choose_rows,
    limits_file,
    measure,
    most_rows,
    read_limits,
    with_product_rows,
    write_limits,
)
from backends.native import library
from backends.worker.kv_cache import PagedKVCache

needs_kernels = pytest.mark.skipif(not library.available(), reason=f"no kernels: {library.load()}")


class Bench:
    """A clock and two ways whose calls take what is said: so much a row, and now and then far longer."""

    def __init__(self, crossing: int, delays: Iterator[float]) -> None:
        self.now = 0.0
        self.calls: list[int] = []
        self._crossing = crossing
        self._delays = delays

    def clock(self) -> float:
        return self.now

    def few(self, num_rows: int) -> None:
        self._take(num_rows, num_rows)

    def many(self, num_rows: int) -> None:
        self._take(num_rows, self._crossing)

    def _take(self, num_rows: int, seconds: float) -> None:
        self.calls.append(num_rows)
        self.now += seconds + next(self._delays)

    def most_rows(self, max_seconds: float = 1e9) -> int | None:
        return most_rows(STEP_ROWS, self.few, self.many, max_seconds=max_seconds, clock=self.clock)


@given(crossing=st.integers(0, 80))
@settings(max_examples=40, derandomize=True, deadline=None)
def test_the_greatest_count_at_which_few_rows_still_win_is_found(crossing: int) -> None:
    bench = Bench(crossing, itertools.repeat(0.0))
    assert bench.most_rows() == max([rows for rows in STEP_ROWS if rows <= crossing], default=STEP_ROWS[0])
    assert len(bench.calls) <= 3 * 2 * (REPEATS + 1)


@given(crossing=st.integers(8, 64), period=st.integers(2, 4))
@settings(max_examples=20, derandomize=True, deadline=None)
def test_calls_that_the_machine_holds_up_change_nothing(crossing: int, period: int) -> None:
    held_up = itertools.cycle([1000.0, *[0.0] * period])
    assert Bench(crossing, held_up).most_rows() == Bench(crossing, itertools.repeat(0.0)).most_rows()


def test_nothing_is_found_when_the_time_runs_out_and_it_does_so_soon() -> None:
    bench = Bench(30, itertools.repeat(1000.0))
    assert bench.most_rows(max_seconds=2500.0) is None
    assert len(bench.calls) == 3


def test_limits_are_kept_and_anything_else_in_the_file_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    assert read_limits(path) is None
    write_limits(path, RowLimits(48, 12))
    assert read_limits(path) == RowLimits(48, 12)
    assert list(tmp_path.iterdir()) == [path]
    for text in ("", "[]", "{}", '{"step": 100000, "product": 8}', '{"step": 32, "product": "x"}'):
        path.write_text(text)
        assert read_limits(path) is None
    write_limits(tmp_path / "no" / "folder", RowLimits())  # a cache that can't be written is no reason to fail


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_folder(tmp_path_factory.mktemp("rows"), "Llama", {}, dtype=torch.bfloat16)
    return load_model(folder, dtype="bf16", weight_dtype="int4")


def dense(loaded: LoadedModel) -> DenseModel:
    assert isinstance(loaded.model, DenseModel)
    return loaded.model


@needs_kernels
def test_the_file_is_another_for_whatever_changes_the_times(loaded: LoadedModel) -> None:
    caches = [PagedKVCache.allocate(loaded.spec, 4, 16, dtype).tensor for dtype in ("bf16", "int8")]
    path, step = Path("/cache/kernels-1.so"), make_native_step(loaded, caches[0])
    files = [
        limits_file(path, dense(loaded), caches[0], step),
        limits_file(path, dense(loaded), caches[0], None),
        limits_file(path, dense(loaded), caches[1], step),
        limits_file(Path("/cache/kernels-2.so"), dense(loaded), caches[0], step),
    ]
    torch.set_num_threads(2)
    try:
        files.append(limits_file(path, dense(loaded), caches[0], step))
    finally:
        torch.set_num_threads(1)
    assert len(set(files)) == len(files)
    assert {file.parent for file in files} == {path.parent}
    assert limits_file(path, dense(loaded), caches[0], step) == files[0]


@needs_kernels
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_measuring_a_real_layer_stays_within_bounds(loaded: LoadedModel, kv_dtype: str) -> None:
    kv = PagedKVCache.allocate(loaded.spec, 4, 16, kv_dtype).tensor
    kv.view(torch.uint8).fill_(255)
    limits = measure(dense(loaded), kv, make_native_step(loaded, kv))
    assert limits is None or (limits.step in STEP_ROWS and limits.product in PRODUCT_ROWS)
    assert (kv.view(torch.uint8) == 255).all(), "the engine's own cache is not for measuring"


@needs_kernels
def test_a_given_number_is_used_without_measuring(loaded: LoadedModel) -> None:
    kv = PagedKVCache.allocate(loaded.spec, 4, 16).tensor
    step = make_native_step(loaded, kv)
    model = dense(choose_rows(loaded, kv, step, compiled_rows=11))
    linears = [model.weights.layers[1].down, model.weights.layers[0].qkv]
    assert step.max_rows == 11
    assert [linear.max_few_rows for linear in linears if isinstance(linear, KernelLinear)] == [11, 11]


@needs_kernels
def test_the_choice_changes_results_by_rounding_alone(loaded: LoadedModel) -> None:
    x = torch.randn(13, 64, dtype=torch.bfloat16)
    by_limit = [
        with_product_rows(dense(loaded), limit).weights.layers[0].gate_up(x).float() for limit in (4, 8, 12, 16)
    ]
    for other in by_limit[1:]:
        torch.testing.assert_close(other, by_limit[0], rtol=0.02, atol=0.02 * float(by_limit[0].abs().max()))
