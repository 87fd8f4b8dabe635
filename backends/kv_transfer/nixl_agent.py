"""The part of NIXL that KV transfer needs, over its own bindings: `nixl.nixl_agent` can't be told to let its progress
thread sleep, and that thread would keep a core busy for as long as the process lives.

UCX has no authentication, and by itself it listens on every network: unless the environment says otherwise it is kept
to this host, where payloads go from memory to memory (`cma`) and only connections are made over loopback.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from backends.kv_transfer.base import TransferError

MemoryKind = Literal["DRAM", "VRAM"]
Descriptors = NDArray[np.uint64]  # [n, 3]: address, bytes, device number
PACKAGES = ("nixl_cu13", "nixl_cu12")  # the wheels behind `nixl`; either is enough without CUDA
INSTALL = "pip install 'kvgate[nixl]'"
PROGRESS_MICROSECONDS = 100_000  # longest sleep of the progress thread; events wake it
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.00002, 0.001
DEFAULTS = {"UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "ERROR"}
ONE_HOST = {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp,cma,self"}
ONE_HOST_CUDA = {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp,cma,self,cuda"}


def missing() -> str | None:
    """Why there is no NIXL here, and what to do; None if there is."""
    try:
        _bindings()
    except ImportError as error:
        return f"nixl can't be imported ({error}). Install it: {INSTALL}"
    return None


def _bindings() -> Any:
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None) or ""
    made_for_torch = f"nixl_cu{cuda.partition('.')[0]}"
    reasons: list[str] = []
    for package in sorted(PACKAGES, key=lambda name: name != made_for_torch):
        try:
            return importlib.import_module(f"{package}._bindings")
        except ImportError as error:
            reasons.append(str(error))
    raise ImportError("; ".join(reasons))


def set_defaults(kind: MemoryKind) -> None:
    """Must be done before the first agent of the process. What the user set stays."""
    for name, value in (DEFAULTS | (ONE_HOST if kind == "DRAM" else ONE_HOST_CUDA)).items():
        os.environ.setdefault(name, value)


class NixlAgent:
    """One end of transfers. Errors of NIXL become `TransferError`. All threads may use it."""

    def __init__(self, name: str, kind: MemoryKind, *, bindings: Any = None) -> None:
        set_defaults(kind)
        self._nixl = nixl = bindings or _bindings()
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = PROGRESS_MICROSECONDS
        config.syncMode = nixl.NIXL_THREAD_SYNC_RW
        self._kinds = {"DRAM": nixl.DRAM_SEG, "VRAM": nixl.VRAM_SEG}
        self._agent = self._call("start an agent", nixl.nixlAgent, name, config)
        self._call("start UCX", self._agent.createBackend, "UCX", {})

    def register(self, kind: MemoryKind, address: int, num_bytes: int, device: int) -> Any:
        """Make memory known to the agent; peers that load its metadata afterwards can write to it."""
        regions = self._nixl.nixlRegDList(self._kinds[kind], [(address, num_bytes, device, "")])
        self._call(f"register {num_bytes} bytes of {kind}", self._agent.registerMem, regions, [])
        return regions

    def deregister(self, regions: Any) -> None:
        self._call("deregister memory", self._agent.deregisterMem, regions, [])

    def metadata(self) -> bytes:
        return bytes(self._call("tell its metadata", self._agent.getLocalMD))

    def connect(self, metadata: bytes) -> Any:
        """A handle for the agent that told this metadata."""
        return self._call("load the peer's metadata", self._agent.loadRemoteMD, metadata)

    def disconnect(self, peer: Any) -> None:
        self._call("let go of the peer", self._agent.invalidateRemoteMD, peer)

    def write(
        self,
        peer: Any,
        source: tuple[MemoryKind, Descriptors],
        target: tuple[MemoryKind, Descriptors],
        *,
        timeout_seconds: float,
        gone: threading.Event,
    ) -> None:
        """Return once all is in the peer's memory. After an error this may still write until `disconnect`."""
        local, remote = (self._nixl.nixlXferDList(self._kinds[kind], rows) for kind, rows in (source, target))
        write = self._nixl.NIXL_WRITE
        request = self._call("prepare a write", self._agent.createXferReq, write, local, remote, peer, b"", [])
        try:
            status = self._call("write", self._agent.postXferReq, request, b"")
            if status == self._nixl.NIXL_IN_PROG:
                status = self._wait(request, timeout_seconds, gone)
            if status != self._nixl.NIXL_SUCCESS:
                raise TransferError(f"nixl could not write: {status}")
        finally:
            # also ends a write that is still on its way
            self._call("release a write", self._agent.releaseXferReq, request)

    def _wait(self, request: Any, timeout_seconds: float, gone: threading.Event) -> Any:
        deadline = time.monotonic() + timeout_seconds
        pause = FIRST_PAUSE_SECONDS
        while True:
            status = self._call("write", self._agent.getXferStatus, request)
            if status != self._nixl.NIXL_IN_PROG:
                return status
            if time.monotonic() > deadline:
                raise TransferError(f"nixl did not write within {timeout_seconds:g} s")
            if gone.wait(pause):
                raise TransferError("the connection was closed")
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    def _call(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:  # the bindings have a dozen kinds, without a common base
            raise TransferError(f"nixl could not {what}: {error}") from error
