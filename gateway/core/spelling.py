"""How modes, transfer modes, KV dtypes and chunk sizes may be written. Pure; a ValueError has the allowed values."""

from __future__ import annotations

from backends.protocol.messages import TransferMode
from gateway.core.types import CacheMode

CHUNK_STEP = 64
SMALL_CHUNK = 128
MAX_CHUNK = 1 << 20

MODES: dict[str, CacheMode] = {
    "merged": CacheMode.MERGED,
    "chunked": CacheMode.MERGED,
    "colocated": CacheMode.MERGED,
    "split": CacheMode.SPLIT,
    "disaggregated": CacheMode.SPLIT,
    "pd": CacheMode.SPLIT,
}
ALLOWED_MODES = "merged (chunked, colocated) or split (disaggregated, pd)"

TRANSFERS: dict[str, TransferMode] = {
    "layer": "layer",
    "layer-wise": "layer",
    "layerwise": "layer",
    "request": "request",
    "request-wise": "request",
    "requestwise": "request",
}
ALLOWED_TRANSFERS = "layer (layer-wise) or request (request-wise)"

TRANSFER_BACKENDS = {
    "local": "local",
    "shared_memory": "local",
    "shm": "local",
    "nixl": "nixl",
    "cuda_ipc": "cuda_ipc",
    "cudaipc": "cuda_ipc",
}
ALLOWED_TRANSFER_BACKENDS = "local (shared memory), nixl or cuda_ipc"

KV_DTYPES: dict[str, str] = {
    "auto": "auto",
    "fp32": "fp32",
    "float32": "fp32",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp8": "fp8",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "int8": "int8",
    "int4": "int4",
}
ENGINE_KV_DTYPES = ("auto", "fp32", "fp16", "bf16", "int8")
ALLOWED_KV_DTYPES = "auto, fp32, fp16, bf16, fp8, int8 or int4"


def parse_mode(text: str) -> CacheMode:
    """Any accepted spelling, in any case, with blanks around it."""
    mode = MODES.get(text.strip().lower())
    if mode is None:
        raise ValueError(f"must be {ALLOWED_MODES}")
    return mode


def parse_transfer(text: str) -> TransferMode:
    transfer = TRANSFERS.get(text.strip().lower().replace("_", "-"))
    if transfer is None:
        other = _backend(text)
        hint = f"; the backend {other} is chosen in the gateway's settings, by transfer.backend" if other else ""
        raise ValueError(f"must be {ALLOWED_TRANSFERS}{hint}")
    return transfer


def parse_transfer_backend(text: str) -> str:
    backend = _backend(text)
    if backend is None:
        other = TRANSFERS.get(text.strip().lower().replace("_", "-"))
        hint = f"; {other} is a transfer mode, set as transfer.kv_transfer_mode" if other else ""
        raise ValueError(f"must be {ALLOWED_TRANSFER_BACKENDS}{hint}")
    return backend


def _backend(text: str) -> str | None:
    return TRANSFER_BACKENDS.get(text.strip().lower().replace("-", "_"))


def parse_kv_dtype(text: str) -> str:
    """The canonical name. What serves may still refuse it."""
    dtype = KV_DTYPES.get(text.strip().lower())
    if dtype is None:
        raise ValueError(f"must be {ALLOWED_KV_DTYPES}")
    return dtype


def round_chunk_size(value: int, name: str) -> tuple[int, tuple[str, ...]]:
    """The chunk size that is used, and what must be said about it. `name` is what the client or file calls it."""
    if not 1 <= value <= MAX_CHUNK:
        raise ValueError(f"must be a whole number from 1 to {MAX_CHUNK}")
    rounded = -(-value // CHUNK_STEP) * CHUNK_STEP
    notices: list[str] = []
    if rounded != value:
        notices.append(f"{name} {value} is not a multiple of {CHUNK_STEP}: {rounded} is used")
    if rounded < SMALL_CHUNK:
        notices.append(f"{name} {rounded} is below {SMALL_CHUNK} and slows the prefill: 512 to 1024 is advised")
    return rounded, tuple(notices)
