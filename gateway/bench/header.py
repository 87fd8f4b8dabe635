"""What was compared, stated above the table: workload, arrivals, cache state, equality of resources, versions. Pure."""

from __future__ import annotations

import os
import platform
import textwrap
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from gateway.bench.options import CompareOptions, Warmth
from gateway.bench.rows import Comparison, Process, roles_of
from gateway.core.types import CacheMode

LINE_WIDTH = 112

COLD = "cold: every measured prompt is new, prefix caches are cleared before each mode and round"
WARM = "warm: prefix caches are cleared, then every prompt is sent once unmeasured before the measured pass"


def heading(comparison: Comparison, options: CompareOptions, url: str) -> str:
    facts = {
        "model": f"{comparison.model.id} at {url}",
        "requests": workload_text(options),
        "arrivals": arrivals_text(options),
        "order": order_text(options),
        "cache": COLD if options.warmth is Warmth.COLD else WARM,
        "resources": resources_text(options.modes, comparison.processes),
        "versions": versions_text(comparison),
    }
    return "\n".join(["kvgate compare", *(_fact(name, fact) for name, fact in facts.items())])


def _fact(name: str, fact: str) -> str:
    wrapper = textwrap.TextWrapper(LINE_WIDTH, subsequent_indent=" " * 12, break_long_words=False)
    wrapper.break_on_hyphens = False
    wrapper.initial_indent = f"  {name.ljust(10)}"
    return wrapper.fill(fact)


def workload_text(options: CompareOptions) -> str:
    prompt = (
        f"{options.prompt_tokens} prompt tokens (random ids, exact)"
        if options.prompt_text is None
        else "prompt from a file, after a line of its own for each request"
    )
    return (
        f"{options.num_requests} a round, {options.num_rounds} rounds; {prompt}, "
        f"{options.output_tokens} output tokens (ignore_eos), temperature 0, seed {options.seed}"
    )


def arrivals_text(options: CompareOptions) -> str:
    return (
        f"closed loop, {options.concurrency} in flight: a request is due the moment another ends, so slow answers "
        "delay later ones; TTFT includes the queue of the engine"
    )


def order_text(options: CompareOptions) -> str:
    names = ", ".join(options.modes)
    return f"{names}; reversed every other round; one warm-up request before each is not measured"


def resources_text(modes: tuple[CacheMode, ...], processes: Mapping[str, Process]) -> str:
    """Threads of each mode, and whether they are the same number: a comparison of unequal ones must say so."""
    totals = {mode: _threads(mode, processes) for mode in modes}
    if None in totals.values():
        return "threads of the engine processes are not known, so equal resources are not certain"
    parts = [f"{mode} {_detail(mode, processes)}" for mode in modes]
    equal = "equal" if len(set(totals.values())) == 1 else "NOT EQUAL"
    return f"threads {equal}: {', '.join(parts)}; {os.cpu_count()} cores here; the idle mode stays loaded"


def _threads(mode: CacheMode, processes: Mapping[str, Process]) -> int | None:
    known = [processes[role].num_threads for role in roles_of(mode) if role in processes]
    counts = [count for count in known if count is not None]
    return sum(counts) if len(counts) == len(roles_of(mode)) else None


def _detail(mode: CacheMode, processes: Mapping[str, Process]) -> str:
    counts = [str(processes[role].num_threads) for role in roles_of(mode)]
    devices = sorted({processes[role].device or "?" for role in roles_of(mode)})
    return f"{'+'.join(counts)} on {'+'.join(devices)}"


def versions_text(comparison: Comparison) -> str:
    dtypes = {f"weights {p.weight_dtype}, KV {p.kv_cache_dtype}" for p in comparison.processes.values()}
    engine = f"; {' / '.join(sorted(dtypes))}" if dtypes else ""
    return f"gateway {comparison.gateway_version or 'unknown'}, client {client_version()}{engine}"


def client_version() -> str:
    try:
        own = version("kvgate")
    except PackageNotFoundError:
        own = "unknown"
    return f"{own} (Python {platform.python_version()}, {platform.system()} {platform.machine()})"
