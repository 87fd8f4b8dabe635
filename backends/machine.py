"""How fast this machine reads memory and multiplies bf16 matrices, for the roofline of `kvgate bench`.

`python -m backends.machine` prints JSON. Each figure is the best of several runs: a bound is what the machine can do,
not what it does on average.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

from backends.core.cores import process_cores

READ_BYTES = 1 << 29  # far more than any cache holds
NUM_ROWS, WIDTH = 1024, 2048
MIN_RUNS = 3
MIN_SECONDS = 1.0


def best_seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Of at least MIN_RUNS runs that together take MIN_SECONDS, after one that isn't counted."""
    work()
    best, total, num_runs = float("inf"), 0.0, 0
    while num_runs < MIN_RUNS or total < MIN_SECONDS:
        started_at = clock()
        work()
        seconds = clock() - started_at
        best, total, num_runs = min(best, seconds), total + seconds, num_runs + 1
    return best


def memory_read_speed(num_bytes: int = READ_BYTES) -> float:
    """Bytes a second, read once from front to back by all threads. The best of two operations that only read."""
    values = torch.ones(num_bytes // 4, dtype=torch.float32)
    rows = values.view(-1, 4096)
    vector = torch.ones(4096)
    seconds = min(best_seconds(values.sum), best_seconds(lambda: torch.mv(rows, vector)))
    return values.numel() * 4 / seconds


def matmul_speed(num_rows: int = NUM_ROWS, width: int = WIDTH) -> float:
    """Floating-point operations a second of a bf16 product of usual size."""
    left = torch.rand(num_rows, width).to(torch.bfloat16)
    right = torch.rand(width, width).to(torch.bfloat16)
    return 2 * num_rows * width * width / best_seconds(lambda: torch.mm(left, right.t()))


def main() -> None:
    num_threads = process_cores()
    torch.set_num_threads(num_threads)
    figures = {
        "memory_read_bytes_per_second": memory_read_speed(),
        "bf16_flops_per_second": matmul_speed(),
        "num_threads": num_threads,
        "torch_version": torch.__version__,
    }
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
