"""NIXL's calls as this project makes them, with bindings that only do what they are told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from backends.kv_transfer import nixl_agent
from backends.kv_transfer.base import TransferError
from backends.kv_transfer.nixl_agent import NixlAgent

ROWS = np.array([(4096, 64, 0)], dtype=np.uint64)


class Config:
    useProgThread: bool
    pthrDelay: int
    syncMode: str


class ScriptedBindings:
    """The module and its agent at once. `statuses` are what a write is found to be, one after the other."""

    DRAM_SEG, VRAM_SEG = "dram", "vram"
    NIXL_WRITE = "write"
    NIXL_SUCCESS, NIXL_IN_PROG, NIXL_ERR = "done", "in progress", "failed"
    NIXL_THREAD_SYNC_RW = "rw"
    nixlAgentConfig = Config

    def __init__(self) -> None:
        self.config: Config | None = None
        self.calls: list[str] = []
        self.statuses: Iterator[str] = iter(["done"])
        self.fail_at: str | None = None

    def nixlAgent(self, _name: str, config: Config) -> ScriptedBindings:
        self.config = config
        return self

    def nixlXferDList(self, kind: str, rows: Any) -> Any:
        return kind, rows.tolist()

    def postXferReq(self, *_arguments: Any) -> str:
        self._note("postXferReq")
        return next(self.statuses)

    getXferStatus = postXferReq

    def __getattr__(self, name: str) -> Any:
        def call(*_arguments: Any) -> str:
            self._note(name)
            return name

        return call

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fail_at:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*nixl_agent.ONE_HOST, *nixl_agent.DEFAULTS):
        monkeypatch.setenv(name, "as it was")


def write(bindings: ScriptedBindings, *, timeout_seconds: float = 10.0, gone: threading.Event | None = None) -> None:
    agent = NixlAgent("a", "DRAM", bindings=bindings)
    agent.write("peer", ("DRAM", ROWS), ("DRAM", ROWS), timeout_seconds=timeout_seconds, gone=gone or threading.Event())


def test_the_progress_thread_may_sleep_and_threads_may_share_an_agent():
    """NIXL's own class leaves the delay at 0, at which the thread never sleeps."""
    bindings = ScriptedBindings()
    NixlAgent("a", "DRAM", bindings=bindings)

    assert bindings.config is not None
    assert bindings.config.useProgThread
    assert bindings.config.pthrDelay == nixl_agent.PROGRESS_MICROSECONDS
    assert bindings.config.syncMode == "rw"


def test_a_write_is_awaited_and_released():
    bindings = ScriptedBindings()
    bindings.statuses = iter(["in progress", "in progress", "done"])

    write(bindings)

    assert bindings.calls.count("postXferReq") == 3
    assert bindings.calls[-1] == "releaseXferReq"


def test_a_failed_write_is_an_error_and_released():
    bindings = ScriptedBindings()
    bindings.statuses = iter(["in progress", "failed"])

    with pytest.raises(TransferError, match="could not write: failed"):
        write(bindings)
    assert bindings.calls[-1] == "releaseXferReq"


def test_a_write_that_never_ends_is_an_error_in_time():
    bindings = ScriptedBindings()
    bindings.statuses = iter(lambda: "in progress", "")

    with pytest.raises(TransferError, match=r"did not write within 0 s"):
        write(bindings, timeout_seconds=0)
    assert bindings.calls[-1] == "releaseXferReq"


def test_a_connection_that_is_closed_ends_writes_that_wait():
    bindings, gone = ScriptedBindings(), threading.Event()
    bindings.statuses = iter(lambda: "in progress", "")
    gone.set()

    with pytest.raises(TransferError, match="was closed"):
        write(bindings, gone=gone)


@pytest.mark.parametrize("call", ["createXferReq", "postXferReq", "createBackend"])
def test_what_nixl_raises_says_what_was_tried(call: str):
    bindings = ScriptedBindings()
    bindings.fail_at = call

    with pytest.raises(TransferError, match=r"nixl could not .*: NIXL_ERR_REMOTE_DISCONNECT"):
        write(bindings)
