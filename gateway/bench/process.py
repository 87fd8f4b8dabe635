"""One server process: started, waited for until it answers, and stopped with everything it started in turn.

Knows nothing of what the server serves. The process leads a session of its own, so that Ctrl-C in a terminal reaches
only this program, which then stops the whole group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from gateway.bench.options import CompareError

STOP_SECONDS = 20.0  # for a server to end by itself before it is killed
POLL_SECONDS = 0.2
SETTLE_SECONDS = 2.0
LOG_LINES = 15

Check = Callable[[], Awaitable[bool]]


class BenchError(CompareError):
    """Something that was to be measured can't be; the message says why."""


class ServerProcess:
    """A running server. Its output goes to a file, whose end explains a server that died."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def wait_ready(self, is_ready: Check, seconds: float) -> None:
        """Return once `is_ready` says so. Raises BenchError if the process ends before, or time is up."""
        try:
            async with asyncio.timeout(seconds):
                while not await is_ready():
                    self.require_alive()
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise BenchError(f"not ready within {seconds:g} s. {self.last_words()}") from None

    async def settle(self) -> None:
        """After a broken connection: a server that is dying has a moment to be dead."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                await self._process.wait()

    def require_alive(self) -> None:
        if self.has_ended:
            raise BenchError(f"the server ended with status {self._process.returncode}. {self.last_words()}")

    def last_words(self) -> str:
        """The end of its output, for an error message."""
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        return "It said:\n    " + "\n    ".join(lines[-LOG_LINES:]) if lines else "It said nothing."

    async def stop(self) -> None:
        """Ask it to end, wait, then kill what is left of its group. Also if this is interrupted once more."""
        try:
            if not self.has_ended:
                _signal_group(self.pid, signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(STOP_SECONDS):
                        await self._process.wait()
        finally:
            _signal_group(self.pid, signal.SIGKILL)
        await self._process.wait()


@contextlib.asynccontextmanager
async def running(command: Sequence[str], environ: Mapping[str, str], log: Path) -> AsyncGenerator[ServerProcess, None]:
    """The started process, stopped however the block is left."""
    with log.open("wb") as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env={**os.environ, **environ},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise BenchError(f"{command[0]} can't be started: {error.strerror}") from None
    server = ServerProcess(process, log)
    try:
        yield server
    finally:
        await server.stop()


def _signal_group(pid: int, number: signal.Signals) -> None:
    """Also after its leader has ended: a group lives as long as any process in it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def free_port() -> int:
    """One that nobody listens at now. Another program may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
