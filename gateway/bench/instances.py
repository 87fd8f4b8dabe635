"""Several instances of one role, as the one process that they are to a comparison. Values only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from gateway.bench.rows import Peaks, Process

_INSTANCE = re.compile(r"(.+?)(?:-\d+)?")


def role_of(name: str) -> str:
    """`prefill` of `prefill` and of `prefill-1`. Of an engine variant's `prefill-1[int8]`: the name as it is."""
    match = _INSTANCE.fullmatch(name)
    return name if match is None or name.endswith("]") else match[1]


def peaks_by_role(peaks: Mapping[str, Peaks], names: Iterable[str]) -> dict[str, Peaks]:
    """Sums over the instances of each role. `names` are those there should be: a partial sum would look small."""
    expected: dict[str, set[str]] = {}
    for name in {*peaks, *names}:
        expected.setdefault(role_of(name), set()).add(name)
    return {
        role: _sum([peaks[name] for name in sorted(members)])
        for role, members in expected.items()
        if members <= peaks.keys()
    }


def _sum(peaks: Sequence[Peaks]) -> Peaks:
    return Peaks(
        memory_bytes=_total([peak.memory_bytes for peak in peaks]),
        kv_blocks=_total([peak.kv_blocks for peak in peaks]),
        num_blocks=_total([peak.num_blocks for peak in peaks]),
    )


def _total(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def processes_by_role(found: Iterable[tuple[str, Process]]) -> dict[str, Process]:
    """Threads are added up; what differs between the instances of a role is not known of the role."""
    members: dict[str, list[Process]] = {}
    for role, process in found:
        members.setdefault(role_of(role), []).append(process)
    return {role: _together(processes) for role, processes in members.items()}


def _together(processes: Sequence[Process]) -> Process:
    first, *others = processes
    if not others:
        return first

    def common(field: str) -> object:
        values = {getattr(process, field) for process in processes}
        return values.pop() if len(values) == 1 else None

    fields = {field: common(field) for field in Process.__struct_fields__}
    devices = dict.fromkeys(process.device or "?" for process in processes)
    threads = _total([process.num_threads for process in processes])
    return Process(**{**fields, "num_threads": threads, "device": "+".join(devices)})  # type: ignore[arg-type]
