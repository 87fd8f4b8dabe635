"""How an engine on a CUDA device computes attention and decode steps: by FlashInfer if it can, by torch otherwise.

Everything is tried when the engine starts. What doesn't work is said in a notice, and torch does it instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.attention.base import AttentionBackend, PagedStep, QuerySpan
from backends.attention.flashinfer import (
    FlashInferAttention,
    FlashInferPackage,
    FlashInferUnavailable,
    load_flashinfer,
    make_workspace,
    unsuited,
)
from backends.attention.reference import ReferenceAttention
from backends.models.base import LoadedModel
from backends.models.cuda_graph_step import CudaGraphs, Graphs, make_cuda_graph_step
from backends.models.dense import DenseModel
from backends.models.dtypes import TORCH_DTYPES
from backends.models.native_step import DecodeStep, StepUnavailable
from backends.protocol.messages import Role

EXTRA = "kvgate[cuda]"


@dataclass(frozen=True, slots=True)
class Computing:
    """What a model runner computes with, and what must be said about it."""

    loaded: LoadedModel
    attention: AttentionBackend
    step: DecodeStep | None = None
    notices: tuple[str, ...] = ()


def cuda_computing(
    loaded: LoadedModel,
    kv: Tensor,
    role: Role,
    *,
    load: Callable[[], FlashInferPackage] = load_flashinfer,
    make_graphs: Callable[[torch.device], Graphs] = CudaGraphs,
) -> Computing:
    """To be called before the cache is used: trying writes to it."""
    try:
        attention = _attention(loaded, kv, load)
    except FlashInferUnavailable as reason:
        notice = f"Attention on {kv.device} is computed by torch, which is slower, and without CUDA graphs: {reason}."
        return Computing(loaded, ReferenceAttention(), notices=(notice,))
    if role == "prefill":
        return Computing(loaded, attention)  # it has no steps of single tokens
    try:
        return Computing(loaded, attention, make_cuda_graph_step(loaded, kv, attention, make_graphs(kv.device)))
    except (StepUnavailable, RuntimeError) as reason:  # RuntimeError: whatever CUDA says of the recording
        return Computing(
            loaded, attention, notices=(f"Decode steps run without CUDA graphs, which is slower: {reason}.",)
        )


def _attention(loaded: LoadedModel, kv: Tensor, load: Callable[[], FlashInferPackage]) -> FlashInferAttention:
    reason = unsuited(kv, TORCH_DTYPES[loaded.spec.dtype])
    if reason is not None:
        raise FlashInferUnavailable(reason)
    try:
        package = load()
    except FlashInferUnavailable as missing:
        raise FlashInferUnavailable(f"{missing}; pip install '{EXTRA}' brings it") from missing
    try:
        attention = FlashInferAttention(package, make_workspace(kv.device))
    except RuntimeError as error:
        raise FlashInferUnavailable(f"there is no memory for FlashInfer's workspace: {error}") from error
    if isinstance(loaded.model, DenseModel):
        _try_out(loaded.model, kv, attention)
    return attention


@torch.inference_mode()
def _try_out(model: DenseModel, kv: Tensor, attention: FlashInferAttention) -> None:
    """Its kernels are compiled on first use: now rather than in a request, and without a compiler torch takes over."""
    block_size = kv.shape[3]
    query = torch.zeros(block_size, model.config.num_heads, kv.shape[-1], dtype=kv.dtype, device=kv.device)
    kinds = {layer.attention.sliding_window: layer.attention for layer in model.weights.layers}
    try:
        for num_tokens in {1, block_size}:
            step = PagedStep((QuerySpan(0, num_tokens, 0, [0]),), torch.arange(num_tokens, device=kv.device))
            for params in kinds.values():
                attention.prepare(kv, step).attend(0, query[:num_tokens], params)
    except (RuntimeError, OSError, ValueError) as error:
        raise FlashInferUnavailable(f"FlashInfer failed when it was tried: {error}") from error
