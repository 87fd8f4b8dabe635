"""Runs copies of KV beside the computing of the next layers: a few threads, two queues, and a record per request.

Copies of the layer just computed go before copies of what was in the cache already, and only so many layers may be in
flight: beyond that the computing waits. Knows nothing of engines; one thread submits, the pool's threads copy.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from backends.core.cores import process_cores, unbind_this_thread
from backends.kv_transfer.base import KVConnector
from backends.kv_transfer.intervals import Interval, covered_seconds, overlapped_seconds


@dataclass(slots=True, eq=False)
class Transfer:
    """The KV of one request on its way. Fields below `target_block_ids` are guarded by the pool's lock."""

    target_block_ids: Sequence[int]
    intervals: list[Interval] = field(default_factory=list)  # in which a copy of this request ran
    num_bytes: int = 0
    num_pending: int = 0
    cancelled: bool = False
    error: Exception | None = None

    def seconds(self) -> float:
        return covered_seconds(self.intervals)

    def overlapped_seconds(self, window: Interval) -> float:
        return overlapped_seconds(self.intervals, window)


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens [start, stop) of one request; its source blocks must not be reused before it is done."""

    transfer: Transfer
    source_block_ids: Sequence[int]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Job:
    layers: Sequence[int]
    parts: list[Part]
    mark: object | None  # what the connector must wait for
    computed: bool  # of the layer just computed, and so counted against `max_in_flight`


class TransferPool:
    """Copies for one pair of caches. Closing it waits for what runs and drops what waits."""

    def __init__(
        self,
        connector: KVConnector,
        *,
        max_in_flight: int,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wake` is called in a pool's thread whenever all that was submitted for a request has been copied."""
        self._connector = connector
        self.max_in_flight = max_in_flight
        self._wake = wake
        self._clock = clock
        lock = threading.Lock()
        self._job_there = threading.Condition(lock)  # one thread is woken for each job: each wake-up disturbs computing
        self._progress = threading.Condition(lock)
        self._computed: deque[_Job] = deque()
        self._whole: deque[_Job] = deque()
        self._num_in_flight = 0  # computed layers, waiting or being copied
        self._closed = False
        self.transferred_bytes = 0
        num_threads = min(max_in_flight, process_cores())
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def submit_computed(self, layers: Sequence[int], parts: Sequence[Part]) -> None:
        """Copy layers that a step has just computed, at most `max_in_flight`; waits until no more are on their way."""
        assert len(layers) <= self.max_in_flight
        mark = self._connector.mark()
        with self._progress:
            self._progress.wait_for(lambda: self._num_in_flight + len(layers) <= self.max_in_flight)
            self._num_in_flight += len(layers)
            self._enqueue(self._computed, _Job(layers, list(parts), mark, computed=True))

    def submit_all_layers(self, part: Part) -> None:
        """Copy every layer of what is in the cache already, whenever nothing just computed is waiting."""
        mark = self._connector.mark()
        with self._progress:
            for layer in range(self._connector.num_layers):
                self._enqueue(self._whole, _Job((layer,), [part], mark, computed=False))

    @property
    def num_layers(self) -> int:
        return self._connector.num_layers

    def is_done(self, transfer: Transfer) -> bool:
        with self._progress:
            return transfer.num_pending == 0

    def cancel(self, transfer: Transfer) -> None:
        """Drop what waits and see what runs to its end: afterwards nothing reads or writes for this transfer."""
        with self._progress:
            transfer.cancelled = True
            for job in (*self._computed, *self._whole):
                dropped = sum(part.transfer is transfer for part in job.parts)
                transfer.num_pending -= dropped
                job.parts[:] = [part for part in job.parts if part.transfer is not transfer]
            self._whole = deque(job for job in self._whole if job.parts)
            self._progress.wait_for(lambda: transfer.num_pending == 0)

    def wait_done(self, transfer: Transfer) -> None:
        """Return once all that was submitted for this transfer has been copied."""
        with self._progress:
            self._progress.wait_for(lambda: transfer.num_pending == 0)

    def close(self) -> None:
        with self._progress:
            self._closed = True
            self._computed.clear()
            self._whole.clear()
            self._job_there.notify_all()
        for thread in self._threads:
            thread.join()
        self._connector.close()

    def _enqueue(self, queue: deque[_Job], job: _Job) -> None:
        for part in job.parts:
            part.transfer.num_pending += 1
        queue.append(job)
        self._job_there.notify()

    def _work(self) -> None:
        unbind_this_thread()  # the engine's thread may be bound to its cores; copies may use those that are idle
        while (job := self._take()) is not None:
            for part in list(job.parts):
                self._copy(job, part)
            with self._progress:
                self._num_in_flight -= len(job.layers) if job.computed else 0
                self._progress.notify_all()

    def _take(self) -> _Job | None:
        with self._job_there:
            self._job_there.wait_for(lambda: self._closed or self._computed or self._whole)
            if self._closed:
                return None
            return self._computed.popleft() if self._computed else self._whole.popleft()

    def _copy(self, job: _Job, part: Part) -> None:
        transfer = part.transfer
        num_bytes, error, start = 0, None, 0.0
        if not transfer.cancelled and transfer.error is None:
            try:
                if job.mark is not None:
                    self._connector.wait_for(job.mark)
                start = self._clock()
                num_bytes = self._connector.save_kv_layers(
                    job.layers, part.source_block_ids, transfer.target_block_ids, part.start, part.stop
                )
            except Exception as exception:  # the engine's thread says so to the peer
                error = exception
        end = self._clock()
        with self._progress:
            transfer.num_pending -= 1
            transfer.num_bytes += num_bytes
            self.transferred_bytes += num_bytes
            transfer.error = transfer.error or error
            if num_bytes:
                transfer.intervals.append((start, end))
            is_done = transfer.num_pending == 0
            self._progress.notify_all()
        if is_done:
            self._wake()


class LayerwiseCopies:
    """Called with each layer of a step as it is computed, from 0 on: hands them to the pools of their parts.

    Some layers at a time: each hand-over wakes a thread, which takes the interpreter from the computing one a while.
    The last two go one by one, so that little is left to copy when the step ends.
    """

    MAX_LAYERS_AT_ONCE = 4

    def __init__(self, parts: Mapping[TransferPool, Sequence[Part]]) -> None:
        self._parts = parts
        self._num_layers = min(pool.num_layers for pool in parts)
        self._at_once = min(self.MAX_LAYERS_AT_ONCE, *(pool.max_in_flight for pool in parts))
        self._waiting: list[int] = []

    def __call__(self, layer: int) -> None:
        self._waiting.append(layer)
        if len(self._waiting) < self._at_once and layer < self._num_layers - 2:
            return
        layers, self._waiting = self._waiting, []
        for pool, parts in self._parts.items():
            pool.submit_computed(layers, parts)
