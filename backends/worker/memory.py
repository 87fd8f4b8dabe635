"""How much memory this process takes now, and the most it took since peaks were reset. Knows no engine."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes. `memory` is the figure to report: resident on a CPU, allocated by tensors on CUDA."""

    resident: int
    shared: int = 0  # the part of `resident` of which other processes may hold the same pages: files, shared memory
    cuda_allocated: int = 0
    cuda_reserved: int = 0
    cuda_device_used: int = 0  # by all processes, as the driver sees it
    peak_cuda_allocated: int = 0

    @property
    def memory(self) -> int:
        return self.cuda_allocated or self.resident


def current_memory(device: str = "cpu") -> MemoryUse:
    resident, shared = _resident_bytes()
    if torch.device(device).type != "cuda":
        return MemoryUse(resident, shared)
    free, total = torch.cuda.mem_get_info(device)
    return MemoryUse(
        resident,
        shared,
        cuda_allocated=torch.cuda.memory_allocated(device),
        cuda_reserved=torch.cuda.memory_reserved(device),
        cuda_device_used=total - free,
        peak_cuda_allocated=torch.cuda.max_memory_allocated(device),
    )


class PeakMemory:
    """The most memory since `reset`. Linux knows it exactly; elsewhere it is the most that `update` has seen."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._peak = 0
        self._kernel_knows = True
        self.reset()

    def reset(self) -> None:
        try:
            _CLEAR_REFS.write_text("5", encoding="ascii")  # "5" resets VmHWM
        except OSError:
            self._kernel_knows = False
        if torch.device(self._device).type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._peak = current_memory(self._device).memory

    def update(self) -> int:
        """Look, and return the peak in bytes."""
        now = current_memory(self._device)
        seen = now.peak_cuda_allocated or max(now.resident, self._kernel_peak())
        self._peak = max(self._peak, seen)
        return self._peak

    def _kernel_peak(self) -> int:
        return _status().get("VmHWM", 0) if self._kernel_knows else 0


def _resident_bytes() -> tuple[int, int]:
    """All, and what is mapped from files or shared memory: the weights of engines, their KV between two, libraries."""
    if _STATUS.exists():
        status = _status()
        return status.get("VmRSS", 0), status.get("RssFile", 0) + status.get("RssShmem", 0)
    # without /proc only the peak since the start is to be had without another process
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024, 0


def _status() -> dict[str, int]:
    """The sizes in it, in bytes."""
    lines = (line.partition(":") for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in lines if value.endswith(" kB")}
