"""When a CUDA device has computed what was queued until now: copies out of a cache there must wait for it."""

from __future__ import annotations

import torch


def mark_computed(device: torch.device) -> torch.cuda.Event | None:
    """In the computing thread. None on a CPU, where what was computed is in memory already."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # waiting for it sleeps
    event.record(torch.cuda.current_stream(device))
    return event


def wait_computed(mark: object) -> None:
    """In any thread."""
    assert isinstance(mark, torch.cuda.Event)
    mark.synchronize()
