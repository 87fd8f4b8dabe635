"""What one engine instance is told at start. Frozen, checked once; no torch."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from backends.protocol.messages import Role, TransferBackend, TransferMode

DType = Literal["auto", "fp32", "bf16", "fp16"]
WeightDType = Literal["auto", "fp32", "bf16", "int8", "int4"]
KVCacheDType = Literal["auto", "fp32", "bf16", "fp16", "int8"]


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One instance of the bundled engine. Read as JSON by `python -m backends --config FILE` (`-` = standard input)."""

    role: Role
    name: str = ""  # of this instance in logs, figures and towards peers; "" = the role
    model: str  # bundled name, Hugging Face folder, GGUF file or hub id
    served_name: str = "smollm2"
    device: str = "cpu"  # "cpu", "cuda:0" ...; "auto:N" = CUDA device N if there is one, else the CPU
    dtype: DType = "auto"  # of activations: bf16 where the CPU multiplies it fast, else fp32
    weight_dtype: WeightDType = "auto"
    # auto = the activations'; int8 where the pool would then hold less than one request of max_model_len tokens
    kv_cache_dtype: KVCacheDType = "auto"
    # split: the smaller of the two pools, by which `auto` decides on both sides, since both must choose alike
    auto_kv_dtype_gib: float | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None  # exact size of the pool; wins over the next two
    kv_cache_gib: float | None = None  # None = 1 GiB on a CPU, gpu_memory_utilization of a CUDA device
    kv_cache_limit_gib: float | None = None  # the pool is never larger than this, unless num_kv_blocks is set
    gpu_memory_utilization: float = 0.90
    max_model_len: int | None = None  # None = the model's own
    max_batched_tokens: int = 2048  # token budget of a step
    prefill_chunk_tokens: int = 512  # most prompt tokens in one step
    prefill_token_ratio: float = 1.0  # most prompt tokens as a share of the budget while anything decodes
    max_num_seqs: int = 64  # running at once
    max_waiting: int = 256  # queued at once; one more is refused with queue_full
    enable_prefix_cache: bool = True
    transfer_mode: TransferMode = "layer"
    max_transfer_concurrency: int = 4  # layers in transfer at once
    transfer_backend: TransferBackend = "local"
    lease_seconds: float = 10.0  # split: longest silence of a peer before it is taken for hung
    handoff_timeout_seconds: float = 120.0  # split: longest wait of a request for its prefill
    num_threads: int | None = None  # None = all cores this process may use
    cpus: tuple[int, ...] | None = None  # cores that the computing threads are bound to; None = not bound
    # most rows of a step that the compiled kernels take before torch does; None = measured once and remembered
    compiled_rows: int | None = None
