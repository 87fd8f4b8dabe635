"""Paged attention by FlashInfer's kernels, on CUDA. The package is imported when it is asked for, never before.

Steps in which every request advances by one token go through its decode kernels; any other mix through its prefill
kernels, which take each request's rows as the last of its keys. Both are told once a step where the keys lie (`plan`)
and then run once a layer. What FlashInfer doesn't take goes the torch way.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from typing_extensions import override

from backends.attention.base import AttentionBackend, AttentionParams, PagedStep, PreparedAttention, QuerySpan
from backends.attention.reference import StepInParts, plan_with_torch

WORKSPACE_BYTES = 128 * 1024 * 1024  # what its documentation advises
LAYOUT = "NHD"  # a page is [block_size, num_kv_heads, head_dim]
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
# From this many query heads per KV head on, its decode on tensor cores is the faster one. It is also the only one for
# group sizes that the other kernel isn't made for, which are all above.
TENSOR_CORE_GROUP = 4


class FlashInferUnavailable(Exception):
    """Why FlashInfer can't be used."""


class Wrapper(Protocol):
    """What is called of the package's wrappers."""

    def plan(self, *args: Tensor | int, **kwargs: object) -> None: ...

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor: ...


class FlashInferPackage(Protocol):
    """What is used of the package."""

    BatchPrefillWithPagedKVCacheWrapper: Callable[..., Wrapper]
    BatchDecodeWithPagedKVCacheWrapper: Callable[..., Wrapper]


def load_flashinfer() -> FlashInferPackage:
    """Raises FlashInferUnavailable, saying why."""
    try:
        return cast(FlashInferPackage, importlib.import_module("flashinfer"))
    except ModuleNotFoundError as error:
        if error.name == "flashinfer":
            raise FlashInferUnavailable("the package flashinfer-python is not installed") from None
        raise FlashInferUnavailable(f"the package flashinfer-python lacks {error.name}") from error
    except (ImportError, OSError, RuntimeError) as error:  # a library that is missing, a CUDA that doesn't fit
        raise FlashInferUnavailable(f"the package flashinfer-python can't be imported: {error}") from error


def unsuited(kv: Tensor, dtype: torch.dtype) -> str | None:
    """Why FlashInfer doesn't take this cache with queries of this type."""
    if kv.dtype not in DTYPES:
        return f"FlashInfer takes no {_name(kv.dtype)} KV cache"
    if kv.dtype != dtype:
        return f"FlashInfer takes no {_name(kv.dtype)} KV cache with {_name(dtype)} queries"
    if kv.shape[-1] not in HEAD_DIMS:
        return f"FlashInfer takes no head size of {kv.shape[-1]}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------------ plans of its wrappers


@dataclass(frozen=True, slots=True)
class Masking:
    """What a plan depends on beside the step: layers that agree on it share a plan."""

    scale: float
    window: int | None
    softcap: float | None

    @classmethod
    def of(cls, params: AttentionParams) -> Masking:
        return cls(params.scale, params.sliding_window, params.softcap)

    def arguments(self) -> dict[str, object]:
        return {
            "sm_scale": self.scale,
            "window_left": -1 if self.window is None else self.window - 1,  # tokens before the row, without it
            "logits_soft_cap": self.softcap,
        }


@dataclass(frozen=True, slots=True)
class Pages:
    """Where the keys of each request of a step lie. Lengths stay on the host, since planning happens there."""

    indptr: Tensor  # int32 [requests + 1]
    indices: Tensor  # int32 [indptr[-1]], on the cache's device
    last_page_len: Tensor  # int32 [requests]


def list_pages(block_ids: Sequence[Sequence[int]], lengths: Sequence[int], kv: Tensor) -> Pages:
    block_size = kv.shape[3]
    indptr, indices = [0], list[int]()
    for ids, length in zip(block_ids, lengths, strict=True):
        indices += ids[: -(-length // block_size)]
        indptr.append(len(indices))
    return Pages(
        torch.tensor(indptr, dtype=torch.int32),
        torch.tensor(indices, dtype=torch.int32, device=kv.device),
        torch.tensor([(length - 1) % block_size + 1 for length in lengths], dtype=torch.int32),
    )


def plan_decode(wrapper: Wrapper, pages: Pages, kv: Tensor, num_heads: int, masking: Masking) -> None:
    wrapper.plan(
        pages.indptr,
        pages.indices,
        pages.last_page_len,
        *_sizes(kv, num_heads),
        q_data_type=kv.dtype,
        kv_data_type=kv.dtype,
        **masking.arguments(),
    )


def plan_prefill(
    wrapper: Wrapper, spans: Sequence[QuerySpan], pages: Pages, kv: Tensor, *, num_heads: int, masking: Masking
) -> None:
    rows = [span.row for span in spans] + [spans[-1].row + spans[-1].num_tokens]
    wrapper.plan(
        torch.tensor(rows, dtype=torch.int32),
        pages.indptr,
        pages.indices,
        pages.last_page_len,
        *_sizes(kv, num_heads),
        causal=True,
        q_data_type=kv.dtype,
        kv_data_type=kv.dtype,
        **masking.arguments(),
    )


def _sizes(kv: Tensor, num_heads: int) -> tuple[int, int, int, int]:
    _, _, _, block_size, num_kv_heads, head_dim = kv.shape
    return num_heads, num_kv_heads, head_dim, block_size


def on_tensor_cores(kv: Tensor, num_heads: int) -> bool:
    return num_heads // kv.shape[4] >= TENSOR_CORE_GROUP


def make_workspace(device: torch.device) -> Tensor:
    """Zeroed, as its first user expects it."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


# --------------------------------------------------------------------------------------------------------- the backend


class FlashInferAttention(AttentionBackend):
    """A step's prepared attention is good until the next step is prepared: wrappers and workspace are shared."""

    def __init__(self, package: FlashInferPackage, workspace: Tensor) -> None:
        self.package = package
        self.workspace = workspace
        self._wrappers: dict[tuple[bool, bool, Masking], Wrapper] = {}

    @override
    def prepare(self, kv: Tensor, step: PagedStep) -> PreparedAttention:
        return _FlashInferStep(self, kv, step)

    def wrapper(self, *, decode: bool, tensor_cores: bool, masking: Masking) -> Wrapper:
        """One for each plan that a step needs at the same time."""
        key = (decode, tensor_cores, masking)
        if key not in self._wrappers:
            self._wrappers[key] = self._make(decode, tensor_cores)
        return self._wrappers[key]

    def _make(self, decode: bool, tensor_cores: bool) -> Wrapper:
        if not decode:
            return self.package.BatchPrefillWithPagedKVCacheWrapper(self.workspace, LAYOUT)
        return self.package.BatchDecodeWithPagedKVCacheWrapper(self.workspace, LAYOUT, use_tensor_cores=tensor_cores)


class _FlashInferStep(PreparedAttention):
    def __init__(self, backend: FlashInferAttention, kv: Tensor, step: PagedStep) -> None:
        self._backend = backend
        self._kv = kv
        self._step = step
        self._decode = all(span.num_tokens == 1 for span in step.spans)
        self._pages: Pages | None = None
        self._planned: dict[Masking, Wrapper] = {}
        self._by_torch: PreparedAttention | None = None

    @override
    def attend(self, layer: int, query: Tensor, params: AttentionParams) -> Tensor:
        if unsuited(self._kv, query.dtype) is not None:
            self._by_torch = self._by_torch or StepInParts(self._kv, self._step, plan_with_torch)
            return self._by_torch.attend(layer, query, params)
        masking = Masking.of(params)
        if masking not in self._planned:
            self._planned[masking] = self._plan(query.shape[1], masking)
        kv = self._kv[layer]
        return self._planned[masking].run(query.contiguous(), (kv[0], kv[1]))

    def _plan(self, num_heads: int, masking: Masking) -> Wrapper:
        spans, kv = self._step.spans, self._kv
        if self._pages is None:
            self._pages = list_pages([span.block_ids for span in spans], [span.stop for span in spans], kv)
        tensor_cores = self._decode and on_tensor_cores(kv, num_heads)
        wrapper = self._backend.wrapper(decode=self._decode, tensor_cores=tensor_cores, masking=masking)
        if self._decode:
            plan_decode(wrapper, self._pages, kv, num_heads, masking)
        else:
            plan_prefill(wrapper, spans, self._pages, kv, num_heads=num_heads, masking=masking)
        return wrapper


# ------------------------------------------------------------------------------------- decode in a graph's fixed memory


class FixedDecode(AttentionBackend, PreparedAttention):
    """Decode attention of always the same number of rows, whose pages are replaced in place between steps.

    `attend` reads nothing but memory of its own and of the cache, so that it can be recorded in a CUDA graph.
    """

    def __init__(
        self, shared: FlashInferAttention, kv: Tensor, layers: Sequence[AttentionParams], *,
        num_heads: int, num_rows: int, max_pages: int,
    ) -> None:  # fmt: skip
        self._kv = kv
        self._num_heads = num_heads
        buffers: dict[str, Any] = {
            "paged_kv_indptr_buffer": torch.zeros(num_rows + 1, dtype=torch.int32, device=kv.device),
            "paged_kv_indices_buffer": torch.zeros(num_rows * max_pages, dtype=torch.int32, device=kv.device),
            "paged_kv_last_page_len_buffer": torch.ones(num_rows, dtype=torch.int32, device=kv.device),
        }
        # Wrappers are told of the same pages, so they share the memory for them.
        self._wrappers = {
            masking: shared.package.BatchDecodeWithPagedKVCacheWrapper(
                shared.workspace,
                LAYOUT,
                use_cuda_graph=True,
                use_tensor_cores=on_tensor_cores(kv, num_heads),
                backend="fa2",  # "auto" may decide anew at each plan, and a recorded graph can't follow
                **buffers,
            )
            for masking in dict.fromkeys(map(Masking.of, layers))
        }

    def plan(self, block_ids: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        pages = list_pages(block_ids, lengths, self._kv)
        for masking, wrapper in self._wrappers.items():
            plan_decode(wrapper, pages, self._kv, self._num_heads, masking)

    @override
    def prepare(self, kv: Tensor, step: PagedStep) -> PreparedAttention:
        return self

    @override
    def attend(self, layer: int, query: Tensor, params: AttentionParams) -> Tensor:
        kv = self._kv[layer]
        return self._wrappers[Masking.of(params)].run(query.contiguous(), (kv[0], kv[1]))
