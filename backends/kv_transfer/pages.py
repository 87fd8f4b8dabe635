"""Makes pages of a mapping resident: the first touch of a page costs several times the copy into it. Linux only.

Elsewhere, and where the kernel is older than 5.14, nothing is done: pages then come when they are touched.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from backends.core.cores import unbind_this_thread
from backends.kv_transfer.base import KVLayout

MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23
MAX_BYTES_AHEAD = 200 * 1000**2
PIECE_BYTES = 256 * 1024  # at once: the process can't map or unmap anything meanwhile
NICE = 10  # of the populating thread: it gives way to computing, but holds the kernel's locks no longer than needed

Populate = Callable[[int, int], bool]  # address, length -> whether it can be done here


@cache
def _madvise() -> Callable[[ctypes.c_void_p, ctypes.c_size_t, int], int] | None:
    """The C function, which ctypes calls without the interpreter lock (the one of `mmap` keeps it)."""
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function


def populate(address: int, length: int, *, write: bool = True) -> bool:
    """Have the pages of a range resident and mapped; False: this system can't.

    `write` makes pages that aren't there yet; without it pages that are there are mapped, at a tenth of the cost.
    """
    madvise = _madvise()
    if madvise is None:
        return False
    start = address & -mmap.PAGESIZE
    advice = MADV_POPULATE_WRITE if write else MADV_POPULATE_READ
    size = ctypes.c_size_t(address + length - start)
    return madvise(ctypes.c_void_p(start), size, advice) == 0 or ctypes.get_errno() in (errno.EINTR, errno.EAGAIN)


class Prefaulter:
    """Keeps the blocks that come next resident, in a thread of its own.

    A pool hands its blocks out from the lowest on before any comes back, so all below the highest block that was ever
    named are resident already; what is kept ahead of that is `num_blocks_ahead`, from the start on.
    """

    def __init__(
        self, buffer: mmap.mmap, layout: KVLayout, *, num_blocks_ahead: int, populate: Populate = populate
    ) -> None:
        self._layout = layout
        self._populate = populate
        self._ahead = num_blocks_ahead
        self._address = np.frombuffer(buffer, dtype=np.uint8).ctypes.data
        self._changed = threading.Condition()
        self._num_wanted = min(num_blocks_ahead, layout.num_blocks)
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="kv-prefault", daemon=True)
        self._thread.start()

    def prefault(self, block_ids: Sequence[int]) -> None:
        """These blocks were handed out. Returns at once."""
        num_wanted = min(max(block_ids, default=-1) + 1 + self._ahead, self._layout.num_blocks)
        with self._changed:
            if num_wanted > self._num_wanted:
                self._num_wanted = num_wanted
                self._changed.notify_all()

    def close(self) -> None:
        """On return nothing touches the memory any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        unbind_this_thread()  # the thread that started this one may be bound to the cores that compute
        if sys.platform.startswith("linux"):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        piece = max(1, PIECE_BYTES // self._layout.bytes_per_block)
        num_done = 0
        while (num_wanted := self._wait_wanted(num_done)) is not None:
            stop = min(num_done + piece, num_wanted)
            if not self._populate_blocks(num_done, stop):
                return
            num_done = stop

    def _wait_wanted(self, num_done: int) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._num_wanted > num_done)
            return None if self._closed else self._num_wanted

    def _populate_blocks(self, first: int, stop: int) -> bool:
        """In every layer. False: closed meanwhile, or this system can't."""
        size = self._layout.bytes_per_block
        for region in range(self._layout.num_layers * 2):
            if self._closed:
                return False
            address = self._address + (region * self._layout.num_blocks + first) * size
            if not self._populate(address, (stop - first) * size):
                return False
        return True


def num_blocks_ahead(layout: KVLayout, num_request_blocks: int) -> int:
    """The blocks of the longest request, but not more than `MAX_BYTES_AHEAD`."""
    return min(num_request_blocks, MAX_BYTES_AHEAD // (layout.num_layers * 2 * layout.bytes_per_block))
