"""Names of data types and what they are in torch, and which one suits a device."""

from __future__ import annotations

import torch

TORCH_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def cpu_multiplies_bf16_fast() -> bool:
    """Without AVX-512 BF16 or AMX, bf16 products are emulated and slower than fp32."""
    tests = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, test, bool)()) for test in tests)


def activation_dtype(name: str, device: str) -> str:
    """The data type that `auto` means on this device; any other name stays."""
    if name != "auto":
        return name
    if torch.device(device).type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    return "bf16" if cpu_multiplies_bf16_fast() else "fp32"
