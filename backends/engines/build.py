"""Puts real parts together: model, KV cache, scheduler and what they need. The place where engines meet torch.

Importing this loads torch; whoever may have to serve without it imports it inside the function that needs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from backends.attention.base import AttentionBackend
from backends.attention.compiled import CompiledAttention
from backends.attention.reference import ReferenceAttention
from backends.config import EngineConfig
from backends.core.block_pool import BlockPool
from backends.core.kv_cache_manager import KVCacheManager
from backends.core.request import Request
from backends.core.scheduler import Scheduler
from backends.engines.base import Emit
from backends.engines.cuda_parts import Computing, cuda_computing
from backends.engines.merged import MergedEngine
from backends.engines.outputs import CompleteTimings, Detokenizer, OutputProcessor
from backends.engines.process_memory import ProcessMemory
from backends.engines.stepper import Stepper
from backends.models.base import LoadedModel
from backends.models.loader import load_model
from backends.models.native_step import NativeStep, StepUnavailable, make_native_step
from backends.models.row_choice import choose_rows
from backends.models.spec import ModelSpec
from backends.models.store import resolve_model
from backends.native import library
from backends.native.library import MAX_HEAD_DIM
from backends.protocol.messages import EngineInfo, Role
from backends.text.tokenizer import TextCodec
from backends.worker.kv_cache import PagedKVCache, choose_kv_dtype, kv_bytes_per_token, num_blocks_for
from backends.worker.model_runner import ModelRunner

# Makes the memory of that many blocks.
KVCacheFactory = Callable[[EngineConfig, ModelSpec, int], PagedKVCache]


@dataclass(frozen=True, slots=True)
class Parts:
    """What every role of engine is made of."""

    codec: TextCodec
    loaded: LoadedModel
    kv_cache: PagedKVCache
    pool: BlockPool
    scheduler: Scheduler
    stepper: Stepper
    memory: ProcessMemory
    info: EngineInfo

    def output_processor(self, emit: Emit, complete_timings: CompleteTimings | None = None) -> OutputProcessor:
        """For the roles that write answers."""
        return OutputProcessor(
            role=self.info.role,
            detokenizer_factory=self._detokenizer,
            emit=emit,
            max_num_tokens=self.scheduler.max_request_tokens,
            peak_memory_bytes=self.memory.peak_bytes,
            complete_timings=complete_timings or (lambda _, timings: timings),
            spell=self.codec.spelling,
        )

    def _detokenizer(self, request: Request) -> Detokenizer:
        """A grammar ends its answer itself."""
        stop = () if request.grammar is not None else request.sampling.stop
        text = request.answer_text
        return self.codec.detokenizer(
            stop, min_tokens=request.sampling.min_tokens, opening=text.opening, marks=text.marks
        )


@dataclass(frozen=True, slots=True)
class BuiltMerged:
    engine: MergedEngine
    codec: TextCodec
    info: EngineInfo


def build_merged(config: EngineConfig, emit: Emit) -> BuiltMerged:
    """Load a model and make the engine that serves it whole. Takes seconds; raises what the loading raises."""
    parts = build_parts(config, "merged")
    engine = MergedEngine(
        info=parts.info,
        scheduler=parts.scheduler,
        stepper=parts.stepper,
        outputs=parts.output_processor(emit),
        memory=parts.memory,
        emit=emit,
    )
    return BuiltMerged(engine, parts.codec, parts.info)


def allocate_kv_cache(config: EngineConfig, spec: ModelSpec, num_blocks: int) -> PagedKVCache:
    """Memory of this process alone, on the model's device."""
    return PagedKVCache.allocate(spec, num_blocks, config.block_size, config.kv_cache_dtype)


def build_parts(config: EngineConfig, role: Role, make_kv_cache: KVCacheFactory = allocate_kv_cache) -> Parts:
    """Load a model and make the parts of an engine of this role. `make_kv_cache` decides where KV memory lies."""
    num_threads = config.num_threads or _num_usable_cores()
    torch.set_num_threads(num_threads)
    path = resolve_model(config.model)
    codec = TextCodec.load(path)
    loaded = load_model(
        path,
        device=config.device,
        dtype=config.dtype,
        weight_dtype=config.weight_dtype,
        max_model_len=config.max_model_len,
    )
    kv_cache_dtype, dtype_notices = choose_kv_dtype(config, loaded.spec)
    config = msgspec.structs.replace(config, kv_cache_dtype=kv_cache_dtype)
    num_blocks = num_blocks_for(config, loaded.spec)
    kv_cache = make_kv_cache(config, loaded.spec, num_blocks)
    pool = BlockPool(num_blocks)
    scheduler = make_scheduler(config, pool)
    if kv_cache.tensor.device.type == "cuda":
        computing = cuda_computing(loaded, kv_cache.tensor, role)
    else:
        computing = _cpu_computing(config, loaded, kv_cache.tensor, role)
    loaded = computing.loaded
    runner = ModelRunner(loaded, kv_cache, computing.attention, computing.step)
    return Parts(
        codec=codec,
        loaded=loaded,
        kv_cache=kv_cache,
        pool=pool,
        scheduler=scheduler,
        stepper=Stepper(scheduler, runner),
        memory=ProcessMemory(config.device),
        info=_info(
            config,
            role,
            model_path=str(path),
            spec=loaded.spec,
            codec=codec,
            num_blocks=num_blocks,
            num_threads=num_threads,
            notices=dtype_notices + computing.notices,
        ),
    )


def _cpu_computing(config: EngineConfig, loaded: LoadedModel, kv: Tensor, role: Role) -> Computing:
    step, notices = _decode_step(loaded, kv, role)
    loaded = choose_rows(loaded, kv, step, config.compiled_rows)
    return Computing(loaded, _attention(kv, loaded.spec.head_dim), step, notices)


def _attention(kv: Tensor, head_dim: int) -> AttentionBackend:
    compiled = kv.device.type == "cpu" and head_dim <= MAX_HEAD_DIM and library.available()
    return CompiledAttention() if compiled else ReferenceAttention()


def _decode_step(loaded: LoadedModel, kv: Tensor, role: Role) -> tuple[NativeStep | None, tuple[str, ...]]:
    """A prefill side has no steps of single tokens worth the memory of a second form of the weights."""
    if role == "prefill":
        return None, ()
    try:
        return make_native_step(loaded, kv), ()
    except StepUnavailable as reason:
        return None, (f"Decode steps are computed by torch, which is slower than the compiled kernels: {reason}.",)


def make_scheduler(config: EngineConfig, pool: BlockPool) -> Scheduler:
    return Scheduler(
        KVCacheManager(pool, config.block_size, config.enable_prefix_cache),
        max_batched_tokens=config.max_batched_tokens,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        prefill_token_ratio=config.prefill_token_ratio,
        max_num_seqs=config.max_num_seqs,
        max_waiting=config.max_waiting,
    )


def _info(
    config: EngineConfig,
    role: Role,
    *,
    model_path: str,
    spec: ModelSpec,
    codec: TextCodec,
    num_blocks: int,
    num_threads: int,
    notices: tuple[str, ...],
) -> EngineInfo:
    num_slots = num_blocks * config.block_size
    notices = spec.notices + _sampling_notice(spec) + notices
    if num_slots < spec.max_model_len:
        notices += (
            f"The KV pool holds {num_slots} tokens, less than the model's context of {spec.max_model_len}; "
            f"requests are limited to {num_slots} tokens. Raise kv_cache_gib or num_kv_blocks for more.",
        )
    return EngineInfo(
        role=role,
        name=config.name or role,
        pid=os.getpid(),
        served_name=config.served_name,
        model_path=model_path,
        model_fingerprint=spec.fingerprint,
        max_model_len=min(spec.max_model_len, num_slots),
        vocab_size=spec.vocab_size,
        block_size=config.block_size,
        num_blocks=num_blocks,
        kv_cache_dtype=config.kv_cache_dtype,
        kv_bytes_per_token=kv_bytes_per_token(spec, config.kv_cache_dtype),
        weight_dtype=spec.weight_dtype,
        device=config.device,
        num_threads=num_threads,
        template_takes_tools=codec.template_takes_tools,
        tool_format=codec.tool_format,
        reasoning_format=codec.reasoning_format,
        rope_scaling=spec.rope_scaling,
        native_max_model_len=spec.native_max_model_len,
        default_sampling=dict(spec.default_sampling),
        notices=notices,
    )


def _sampling_notice(spec: ModelSpec) -> tuple[str, ...]:
    if not spec.default_sampling:
        return ()
    advised = ", ".join(f"{name} {value:g}" for name, value in spec.default_sampling)
    return (f"Requests without a temperature are sampled as the model's generation_config.json advises: {advised}.",)


def _num_usable_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
