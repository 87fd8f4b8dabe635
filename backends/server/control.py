"""The control socket: its end of stream means that the gateway died; sockets to a peer arrive over it.

Runs in a thread of its own, so that it also watches while the rest of the process loads a model.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import NamedTuple

logger = logging.getLogger(__name__)

MAX_NAME_BYTES = 256  # of a peer's name, the bytes that travel beside its socket
PR_SET_PDEATHSIG = 1


class Arrival(NamedTuple):
    """A peer's name and the socket to it. A name that is connected already is replaced."""

    name: str
    sock: socket.socket


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, even while a C call holds the interpreter.

    A parent that died before the request is noticed here by its changed pid, or by the end of the control socket.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        logger.warning("the kernel refused PR_SET_PDEATHSIG; the end of the control socket is watched all the same")
    if os.getppid() != parent:
        os._exit(0)


def watch_control(control: socket.socket, *, peer_arrived: Callable[[Arrival], None]) -> None:
    """Start the watching thread. `peer_arrived` is called in it; the process ends when the control socket does."""
    control.setblocking(True)
    threading.Thread(target=_watch, args=(control, peer_arrived), name="control", daemon=True).start()


def _watch(control: socket.socket, peer_arrived: Callable[[Arrival], None]) -> None:
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(
                control, MAX_NAME_BYTES, 1
            )  # never more than one: a descriptor ends a read
        except OSError as error:
            logger.error("the control socket broke: %s", error)
            data, descriptors = b"", []
        if not data:
            os._exit(0)  # no clean-up could reach anyone: the gateway is gone, and all we hold is anonymous memory
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
            peer_arrived(Arrival(data.decode(errors="replace"), socket.socket(fileno=descriptor)))
