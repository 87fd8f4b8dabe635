"""This process' memory in the form that engines report it. Loads torch."""

from __future__ import annotations

from backends.engines.stats import MemoryReading
from backends.worker.memory import PeakMemory, current_memory


class ProcessMemory:
    """Implements `backends.engines.stats.MemoryProbe` for the device an engine computes on."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._peak = PeakMemory(device)

    def read(self) -> MemoryReading:
        peak = self._peak.update()
        now = current_memory(self._device)
        return MemoryReading(
            memory_bytes=now.memory,
            shared_memory_bytes=0 if now.cuda_allocated else now.shared,
            peak_memory_bytes=peak,
            cuda_allocated_bytes=now.cuda_allocated,
            cuda_reserved_bytes=now.cuda_reserved,
            cuda_device_used_bytes=now.cuda_device_used,
        )

    def peak_bytes(self) -> int:
        return self._peak.update()

    def reset_peak(self) -> None:
        self._peak.reset()
