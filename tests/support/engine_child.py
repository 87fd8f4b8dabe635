"""A real `python -m backends` process, driven from a test as the gateway would, over its two sockets."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from backends.protocol.framing import Decoder, Encoder
from backends.protocol.messages import FromEngine, Generate, SamplingParams, TextPrompt

DEADLINE_SECONDS = 20.0


class EngineChild:
    """The gateway's ends of one instance. Reading has a deadline."""

    def __init__(self, process: subprocess.Popen[bytes], gateway: socket.socket, control: socket.socket) -> None:
        self.process = process
        self.gateway = gateway
        self.control = control
        self._decoder: Decoder[FromEngine] = Decoder(FromEngine)
        self._unread: list[FromEngine] = []
        gateway.settimeout(DEADLINE_SECONDS)

    def send(self, message: msgspec.Struct) -> None:
        self.gateway.sendall(Encoder().encode(message))

    def generate(self, request_id: str, text: str = "one two", max_tokens: int = 4, **sampling: Any) -> None:
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        self.send(Generate(request_id=request_id, prompt=TextPrompt(text=text), sampling=params))

    def read(self) -> FromEngine | None:
        """The next message; None at the end of the stream."""
        while not self._unread:
            data = self.gateway.recv(65536)
            if not data:
                return None
            self._unread += self._decoder.feed(data)
        return self._unread.pop(0)

    def read_until(self, kind: type[msgspec.Struct]) -> Any:
        """The next message of a kind; what comes before it is dropped."""
        while True:
            message = self.read()
            if message is None:
                raise AssertionError(f"the stream ended before {kind.__name__}")
            if isinstance(message, kind):
                return message

    def read_log_until(self, text: str) -> None:
        """Wait for a line of its log; a test's own time limit ends the wait."""
        assert self.process.stderr is not None
        while text.encode() not in self.process.stderr.readline():
            assert self.process.poll() is None, f"it ended before it logged {text!r}"

    def exit_code(self) -> int:
        return self.process.wait(DEADLINE_SECONDS)


@contextmanager
def engine_child(**config: Any) -> Iterator[EngineChild]:
    """One instance with this EngineConfig; killed at the end if it still lives."""
    gateway, gateway_there = socket.socketpair()
    control, control_there = socket.socketpair()
    with gateway, control:
        with gateway_there, control_there:
            fds = (gateway_there.fileno(), control_there.fileno())
            command = [sys.executable, "-m", "backends", "--config", "-"]
            command += ["--gateway-fd", str(fds[0]), "--control-fd", str(fds[1])]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=fds)
        assert process.stdin is not None
        assert process.stderr is not None
        with process.stdin, process.stderr:
            process.stdin.write(json.dumps({"role": "merged", "model": "scripted"} | config).encode())
            process.stdin.close()
            try:
                yield EngineChild(process, gateway, control)
            finally:
                process.kill()
                process.wait()
