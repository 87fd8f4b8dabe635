"""How many rows the compiled kernels take before torch's products over all rows win, on this machine.

The kernels read the weights once for every few rows and torch once for all, so the crossing depends on the processor,
its memory, the threads and the shapes. It is measured on a model's first layer when an engine starts, and kept in the
user's cache, so that later starts only read it. Which side of it a step is on changes its speed, not its meaning.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from backends.attention.base import PagedStep, QuerySpan
from backends.attention.compiled import CompiledAttention
from backends.attention.paged import PagedAttention
from backends.models.base import LoadedModel
from backends.models.dense import DenseModel
from backends.models.linear import KernelLinear, Linear
from backends.models.native_step import MAX_STEP_ROWS, DecodeRows, NativeStep
from backends.native import library
from backends.native.library import MAX_ROWS

# What may be chosen. However wrong a measurement on a busy machine is, neither end costs much.
STEP_ROWS = (8, 16, 24, 32, 40, 48, 56, 64)
PRODUCT_ROWS = (4, 6, 8, 12, 16)
REPEATS = 5
STEP_SECONDS, PRODUCT_SECONDS = 0.08, 0.04  # longest measuring of each

Way = Callable[[int], object]  # computes that many rows


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Most rows that compiled code takes: of a step of single tokens, and of one product with packed weights."""

    step: int = MAX_STEP_ROWS
    product: int = MAX_ROWS


def choose_rows(
    loaded: LoadedModel, kv: Tensor, step: NativeStep | None, compiled_rows: int | None = None
) -> LoadedModel:
    """The model with limits as given, remembered or measured; its decode step is told its own."""
    model = loaded.model
    if not isinstance(model, DenseModel):
        return loaded
    if compiled_rows is not None:
        limits = RowLimits(compiled_rows, compiled_rows)
    else:
        limits = _remembered_or_measured(model, kv, step)
    if step is not None:
        step.max_rows = limits.step
    return replace(loaded, model=with_product_rows(model, limits.product))


def with_product_rows(model: DenseModel, max_few_rows: int) -> DenseModel:
    """The same model, with another limit of its packed products."""

    def limited(linear: Linear) -> Linear:
        return replace(linear, max_few_rows=max_few_rows) if isinstance(linear, KernelLinear) else linear

    layers = tuple(layer.with_products(limited) for layer in model.weights.layers)
    return DenseModel(model.config, replace(model.weights, layers=layers, head=limited(model.weights.head)))


# ------------------------------------------------------------------------------------------------------- remembering


def _remembered_or_measured(model: DenseModel, kv: Tensor, step: NativeStep | None) -> RowLimits:
    library_path = library.loaded_from()
    if library_path is None:
        return RowLimits()  # nothing is compiled, so nothing has to be chosen
    path = limits_file(library_path, model, kv, step)
    known = read_limits(path) or measure(model, kv, step)
    if known is None:  # the machine was too busy, or the model is too large: perhaps the next start can tell
        return RowLimits()
    write_limits(path, known)
    return known


def limits_file(library_path: Path, model: DenseModel, kv: Tensor, step: NativeStep | None) -> Path:
    """Named after all that the measurement depends on; the library's own name stands for processor and kernels."""
    layer = model.weights.layers[0]
    weights = [_form(linear) for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    facts = [
        library_path.name, torch.__version__, torch.get_num_threads(), repr(model.config), weights, str(kv.dtype),
        step is not None, STEP_ROWS, PRODUCT_ROWS,
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return library_path.with_name(f"rows-{digest[:16]}.json")


def _form(linear: Linear) -> str:
    return f"packed {linear.packed.kind}" if isinstance(linear, KernelLinear) else type(linear).__name__


def read_limits(path: Path) -> RowLimits | None:
    """None if there is no such file, or somebody else's."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        limits = RowLimits(int(found["step"]), int(found["product"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    in_bounds = limits.step in (*STEP_ROWS, MAX_STEP_ROWS) and limits.product in (*PRODUCT_ROWS, MAX_ROWS)
    return limits if in_bounds else None


def write_limits(path: Path, limits: RowLimits) -> None:
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with contextlib.suppress(OSError):  # a cache that can't be written costs a measurement at the next start
        partial.write_text(json.dumps({"step": limits.step, "product": limits.product}), encoding="utf-8")
        partial.replace(path)


# --------------------------------------------------------------------------------------------------------- measuring


@torch.inference_mode()
def measure(model: DenseModel, kv: Tensor, step: NativeStep | None) -> RowLimits | None:
    """None if the time ran out. `kv` is only asked for its form."""
    limits = RowLimits()
    if step is not None:
        compiled, plain = _step_ways(model, kv, step)
        most = most_rows(STEP_ROWS, compiled, plain, max_seconds=STEP_SECONDS)
        if most is None:
            return None
        limits = replace(limits, step=most)
    layer = model.weights.layers[0]
    packed = [item for item in (layer.qkv, layer.output, layer.gate_up, layer.down) if isinstance(item, KernelLinear)]
    if packed:
        few, many = _product_ways(packed, model.weights.embedding.dtype)
        most = most_rows(PRODUCT_ROWS, few, many, max_seconds=PRODUCT_SECONDS)
        if most is None:
            return None
        limits = replace(limits, product=most)
    return limits


class _TimeIsUp(Exception):
    pass


def most_rows(
    candidates: Sequence[int],
    few: Way,
    many: Way,
    *,
    max_seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> int | None:
    """The greatest candidate for which `few` is the faster way, the least one if it never is; None if time ran out.

    Candidates rise, and so does the advantage of `many`: a few of them are tried.
    """
    deadline = clock() + max_seconds
    low, high = 0, len(candidates)  # the answer is at or after low, and before high
    try:
        while high - low > 1:
            middle = (low + high) // 2
            if _few_wins(candidates[middle], few, many, deadline, clock):
                low = middle
            else:
                high = middle
    except _TimeIsUp:
        return None
    return candidates[low]


def _few_wins(num_rows: int, few: Way, many: Way, deadline: float, clock: Callable[[], float]) -> bool:
    """By the least time of each: what else the machine does can only add to it, and both take turns.

    The first call of each doesn't count: it prepares what later ones with the same shapes use.
    """
    least = [float("inf"), float("inf")]
    for repeat in range(REPEATS + 1):
        for index, way in enumerate((few, many)):
            start = clock()
            if start >= deadline:
                raise _TimeIsUp
            way(num_rows)
            if repeat:
                least[index] = min(least[index], clock() - start)
    return least[0] <= least[1]


def _product_ways(linears: Sequence[KernelLinear], dtype: torch.dtype) -> tuple[Way, Way]:
    inputs = [torch.ones(max(PRODUCT_ROWS), linear.packed.in_features, dtype=dtype) for linear in linears]

    def few(num_rows: int) -> object:
        return [linear.few_rows(x[:num_rows]) for linear, x in zip(linears, inputs, strict=True)]

    def many(num_rows: int) -> object:
        return [linear.many_rows(x[:num_rows]) for linear, x in zip(linears, inputs, strict=True)]

    return few, many


def _step_ways(model: DenseModel, kv: Tensor, step: NativeStep) -> tuple[Way, Way]:
    """A step of the first layer, each row the first token of its request, over a cache of a few blocks."""
    _, _, _, block_size, num_kv_heads, row = kv.shape
    cache = torch.zeros(1, 2, max(STEP_ROWS), block_size, num_kv_heads, row, dtype=kv.dtype)
    compiled_layer = step.first_layer(cache)
    plain_layer = DenseModel(model.config, replace(model.weights, layers=model.weights.layers[:1]))
    attention, no_rows = CompiledAttention(), torch.empty(0, dtype=torch.int64)

    def rows(num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        zeros = torch.zeros(num_rows, dtype=torch.int64)
        return zeros, zeros, torch.arange(num_rows) * block_size

    def compiled(num_rows: int) -> object:
        tokens, positions, slots = rows(num_rows)
        return compiled_layer.logits(DecodeRows(tokens, positions, slots, [[i] for i in range(num_rows)]))

    def plain(num_rows: int) -> object:
        tokens, positions, slots = rows(num_rows)
        paged = PagedStep(tuple(QuerySpan(i, 1, 0, [i]) for i in range(num_rows)), slots)
        return plain_layer.forward(tokens, positions, PagedAttention(cache, paged, attention), no_rows)

    return compiled, plain
