"""How many threads a decode step uses, from how long the last ones took. Pure: knows no kernels and no clock.

A step of several threads meets at many barriers, so one thread that the machine's other programs keep waiting holds up
all of them: what takes 3 ms on idle cores takes 200 ms on busy ones, where a single thread still takes 5. Steps are
compared with steps of about the same work. While their times are steady nothing is tried: the machine is idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from statistics import median

NUM_KEPT = 7  # step times of each choice; their median ignores single hiccups
FIRST_PROBE = 8  # steps before the other choice is tried for the first time
MAX_PROBE_EVERY = 1024  # each try that changes nothing doubles the distance to the next
NUM_PROBES = 3  # steps of a try: the first of them still wakes threads
ALARM = 4.0  # times the usual: two steps in a row that slow start a try at once
NUM_ALARMS = 2
STEADY = 2.0  # the slowest of the last steps against the fastest: idle machines stay below, and need no try
ADVANTAGE = 0.9  # the other choice must be this much faster, so that noise doesn't switch


@dataclass
class _Work:
    """Steps of about the same work."""

    many: bool = True
    probe_every: int = FIRST_PROBE
    steps_until_probe: int = FIRST_PROBE
    probes_left: int = 0
    alarms: int = 0
    times: dict[bool, deque[float]] = field(
        default_factory=lambda: {many: deque(maxlen=NUM_KEPT) for many in (False, True)}
    )

    def usual(self, many: bool) -> float | None:
        return median(self.times[many]) if self.times[many] else None

    def is_steady(self) -> bool:
        times = self.times[self.many]
        return bool(times) and max(times) <= STEADY * min(times)

    def wait(self, steps: int) -> None:
        self.probe_every = steps
        self.steps_until_probe = steps


class ThreadChoice:
    """One thread, or all `max_threads`."""

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._works: dict[Hashable, _Work] = {}

    def choose(self, work: Hashable) -> int:
        """The number of threads for the next step of this work."""
        state = self._works.setdefault(work, _Work())
        many = state.many != (state.probes_left > 0)
        return self._max_threads if many else 1

    def record(self, work: Hashable, num_threads: int, seconds: float) -> None:
        """What a step of this work took."""
        if self._max_threads == 1:
            return
        state = self._works.setdefault(work, _Work())
        many = num_threads > 1
        if state.probes_left:
            state.times[many].append(seconds)
            self._after_probe(state)
            return
        usual = state.usual(many)
        slow = usual is not None and seconds > ALARM * usual
        state.alarms = state.alarms + 1 if slow else 0
        if not slow:  # alarms stay out of the usual, so that the second is one too
            state.times[many].append(seconds)
        state.steps_until_probe -= 1
        if state.alarms == NUM_ALARMS:
            state.times[many].clear()
            state.times[many].append(seconds)
            self._start_probe(state)
        elif state.steps_until_probe <= 0 and state.many and state.is_steady():
            state.wait(state.probe_every)
        elif state.steps_until_probe <= 0:
            self._start_probe(state)

    @staticmethod
    def _start_probe(state: _Work) -> None:
        state.alarms = 0
        state.probes_left = NUM_PROBES
        state.times[not state.many].clear()

    @staticmethod
    def _after_probe(state: _Work) -> None:
        state.probes_left -= 1
        if state.probes_left:
            return
        other, now = state.usual(not state.many), state.usual(state.many)
        if other is not None and now is not None and other < ADVANTAGE * now:
            state.many = not state.many
            state.wait(FIRST_PROBE * 4)
        else:
            state.wait(min(2 * state.probe_every, MAX_PROBE_EVERY))
