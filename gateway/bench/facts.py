"""What a figure depends on besides the program: processor, system, versions, commit. Reads files; measures nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gateway.bench.header import client_version

CPU_INFO = Path("/proc/cpuinfo")
# Of the hundred flags of a processor, those that decide which kernels run.
TELLING_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "avx_vnni", "amx_bf16",
                 "amx_int8", "asimd", "bf16", "i8mm", "sve")  # fmt: skip


def machine_facts(cpu_info: Path = CPU_INFO) -> dict[str, str]:
    name, flags = read_cpu(cpu_info)
    return {
        "processor": name,
        "cores": str(num_cores()),
        "cpu flags": " ".join(flags) or "unknown",
        "system": f"{platform.system()} {platform.release()}",
        "client": client_version(),
        "commit": commit(),
        "load at start": " ".join(f"{load:.2f}" for load in os.getloadavg()) if hasattr(os, "getloadavg") else "?",
    }


def read_cpu(cpu_info: Path) -> tuple[str, list[str]]:
    """Name and telling flags of the first processor."""
    try:
        lines = cpu_info.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine(), []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set((fields.get("flags") or fields.get("Features", "")).split())
    return fields.get("model name", platform.machine()), [flag for flag in TELLING_FLAGS if flag in flags]


def commit(folder: Path = Path(__file__).parent) -> str:
    """Of the checkout this code lies in; `+` where it has changes."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    except OSError:
        return "unknown"
    return answer.stdout.strip() or "unknown"


def num_cores() -> int:
    """That this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def own_version() -> str:
    try:
        return version("kvgate")
    except PackageNotFoundError:
        return "unknown"
