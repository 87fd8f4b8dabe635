"""One engine process: its sockets, its start, its end. Knows nothing of why it is started or ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from backends.protocol.link import FrameLink, open_link
from backends.protocol.messages import FromEngine

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "backends")
STDERR = 2


class ProcessEvents(Protocol):
    """Who is told of a process's life."""

    def received(self, message: FromEngine) -> None: ...

    def lost(self, reason: str) -> None: ...

    def exited(self, reason: str) -> None: ...


class EngineProcess:
    """A running `python -m backends`. The last thing it reports is `exited`."""

    def __init__(
        self, process: asyncio.subprocess.Process, link: FrameLink[FromEngine], control: socket.socket
    ) -> None:
        self._process = process
        self._control = control
        self.link = link
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, exited: Callable[[str], None]) -> None:
        self._watch = asyncio.get_running_loop().create_task(self._wait(exited))

    async def _wait(self, exited: Callable[[str], None]) -> None:
        code = await self._process.wait()
        self.link.close()
        await self.link.closed()
        self._control.close()
        exited(exit_reason(code))

    def send_peer(self, sock: socket.socket, name: str) -> None:
        """Give the process its end of a connection to the peer of this name. To a dead one nothing happens."""
        with contextlib.suppress(OSError):
            socket.send_fds(self._control, [name.encode()], [sock.fileno()])

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


async def spawn_engine(command: Sequence[str], config: dict[str, Any], events: ProcessEvents) -> EngineProcess:
    """Start one instance. Raises OSError if there can be no process.

    No other process ever holds our ends of the sockets, so both sides see the other's death as the end of stream.
    """
    gateway, gateway_there = socket.socketpair()
    control, control_there = socket.socketpair()
    try:
        with gateway_there, control_there:
            process = await _start(command, gateway_there, control_there)
    except BaseException:
        gateway.close()
        control.close()
        raise
    try:
        link: FrameLink[FromEngine] = await open_link(gateway, FromEngine, received=events.received, lost=events.lost)
        control.setblocking(False)
        engine = EngineProcess(process, link, control)
    except BaseException:
        process.kill()  # nobody would ever watch it
        await process.wait()
        control.close()
        raise
    engine.watch(events.exited)
    await _send_config(process, config)
    return engine


async def _start(command: Sequence[str], gateway: socket.socket, control: socket.socket) -> asyncio.subprocess.Process:
    descriptors = (gateway.fileno(), control.fileno())
    arguments = ("--config", "-", "--gateway-fd", str(descriptors[0]), "--control-fd", str(descriptors[1]))
    return await asyncio.create_subprocess_exec(
        *command,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=STDERR,  # what libraries print must not mix with what the gateway prints
        pass_fds=descriptors,
    )


async def _send_config(process: asyncio.subprocess.Process, config: dict[str, Any]) -> None:
    """A process that dies before it has read this reports itself by its exit."""
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(json.dumps(config).encode())
        await process.stdin.drain()
    process.stdin.close()
    with contextlib.suppress(ConnectionError):
        await process.stdin.wait_closed()


def exit_reason(code: int) -> str:
    if code >= 0:
        return f"the process exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"the process was killed by {name}"
