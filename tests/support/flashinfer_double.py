"""FlashInfer on the CPU: its wrappers' documented interface, kept strictly, around attention written out.

It plans from nothing but what it is given, attends page by page in fp32, and refuses what the package would refuse or
take for something else: wrong types, layouts and devices, a run without a plan, a graph's wrapper with other sizes.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

KNOWN_GROUPS = (1, 2, 3, 4, 6, 8, 16)  # of the decode kernel that doesn't use tensor cores


def _check_ints(name: str, tensor: Tensor, size: int | None = None) -> None:
    assert (tensor.dtype, tensor.dim(), tensor.is_contiguous()) == (torch.int32, 1, True), name
    assert size is None or len(tensor) == size, f"{name} has {len(tensor)} entries, not {size}"


class _Wrapper:
    kind = ""

    def __init__(self, package: FlashInferDouble, workspace: Tensor, kv_layout: str) -> None:
        assert workspace.dtype == torch.uint8
        assert not workspace.any(), "zeroed before its first use"
        assert kv_layout == "NHD"
        self.package = package
        self.workspace = workspace
        self.planned: SimpleNamespace | None = None

    def _plan(
        self,
        qo_indptr: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        sizes: tuple[int, int, int, int],
        *,
        causal: bool,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        num_requests = len(last_page_len)
        for name, tensor in (("qo_indptr", qo_indptr), ("indptr", indptr)):
            _check_ints(name, tensor, num_requests + 1)
            assert tensor[0] == 0, name
            assert (tensor.diff() > 0).all(), name
        _check_ints("indices", indices, int(indptr[-1]))
        _check_ints("last_page_len", last_page_len)
        num_heads, num_kv_heads, head_dim, page_size = sizes
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        assert num_heads % num_kv_heads == 0
        assert head_dim in (64, 128, 256)
        assert q_data_type in (torch.float16, torch.bfloat16)
        assert kv_data_type in (None, q_data_type)
        assert window_left >= -1
        self.planned = SimpleNamespace(
            qo_indptr=qo_indptr.clone(), indptr=indptr, indices=indices, last_page_len=last_page_len, sizes=sizes,
            causal=causal, scale=sm_scale or head_dim**-0.5, window_left=window_left,
            softcap=logits_soft_cap or 0.0, dtype=q_data_type,
        )  # fmt: skip
        self.package.plans.append(self.kind)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        plan = self.planned
        assert plan is not None, "run without plan"
        num_heads, num_kv_heads, head_dim, page_size = plan.sizes
        keys, values = paged_kv_cache
        assert q.shape == (int(plan.qo_indptr[-1]), num_heads, head_dim)
        assert q.is_contiguous()
        assert q.dtype == keys.dtype == values.dtype == plan.dtype
        assert keys.shape == values.shape
        assert keys.shape[1:] == (page_size, num_kv_heads, head_dim)
        assert keys.stride() == values.stride()
        assert keys[0].is_contiguous()
        self.package.runs.append(self.kind)
        out = torch.empty_like(q)
        for request in range(len(plan.last_page_len)):
            pages = plan.indices[int(plan.indptr[request]) : int(plan.indptr[request + 1])].long()
            length = (len(pages) - 1) * page_size + int(plan.last_page_len[request])
            rows = slice(int(plan.qo_indptr[request]), int(plan.qo_indptr[request + 1]))
            key, value = (cache[pages].flatten(0, 1)[:length].float() for cache in (keys, values))
            out[rows] = _attend(q[rows].float(), key, value, plan).to(q.dtype)
        return out


def _attend(query: Tensor, key: Tensor, value: Tensor, plan: SimpleNamespace) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * plan.scale
    if plan.softcap:
        scores = torch.tanh(scores / plan.softcap) * plan.softcap
    positions = torch.arange(key.shape[0])
    rows = positions[-query.shape[0] :, None]  # the queries are the last of the keys
    hidden = positions > rows if plan.causal else torch.zeros(1, 1, dtype=torch.bool)
    if plan.window_left >= 0:
        hidden = hidden | (positions < rows - plan.window_left)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), value)


class _Prefill(_Wrapper):
    kind = "prefill"

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._plan(qo_indptr, *pages, sizes, causal=causal, **options)


class _Decode(_Wrapper):
    kind = "decode"

    def __init__(
        self,
        package: FlashInferDouble,
        workspace: Tensor,
        kv_layout: str,
        *,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(package, workspace, kv_layout)
        assert backend in ("auto", "fa2")
        self._tensor_cores = use_tensor_cores
        self._buffers: tuple[Tensor, Tensor, Tensor] | None = None
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self._buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, **options: Any,
    ) -> None:  # fmt: skip
        assert self._tensor_cores or num_qo_heads // num_kv_heads in KNOWN_GROUPS
        pages = (indptr, indices, last_page_len)
        if self._buffers is not None:
            assert len(last_page_len) == len(self._buffers[2]), "the batch size of a graph is fixed"
            for buffer, given in zip(self._buffers, pages, strict=True):
                buffer[: len(given)] = given
            pages = (self._buffers[0], self._buffers[1][: len(indices)], self._buffers[2])
        rows = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self._plan(rows, *pages, (num_qo_heads, num_kv_heads, head_dim, page_size), causal=False, **options)


class FlashInferDouble:
    """Stands for the imported package; `plans` and `runs` say what was called."""

    def __init__(self) -> None:
        self.plans: list[str] = []
        self.runs: list[str] = []

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> _Prefill:
        return _Prefill(self, *args, **kwargs)

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> _Decode:
        return _Decode(self, *args, **kwargs)
