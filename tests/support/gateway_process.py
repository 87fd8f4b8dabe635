"""A real `kvgate serve` as a child process, and what tests want to know of it and its engines."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

DEADLINE_SECONDS = 60.0


def wait_until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
    """Poll until `condition` returns something true; fail with `what` after the deadline."""
    deadline = time.monotonic() + seconds
    tick = threading.Event()
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        tick.wait(0.02)
    raise AssertionError(f"not within {seconds} s: {what}")


class GatewayProcess:
    """One running gateway. `log` is what it has printed so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = wait_until(self._find_url, "the gateway printed its URL")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)

    @property
    def log(self) -> str:
        return "".join(self._lines)

    def _find_url(self) -> str | None:
        if self.process.poll() is not None:
            self._reader.join(1)
            raise AssertionError(f"the gateway ended with {self.process.returncode}:\n{self.log}")
        found = re.search(r"http://127\.0\.0\.1:\d+", self.log)
        return found.group() if found else None

    def get(self, path: str) -> Any:
        return self.call("GET", path)[2]

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers (lower-case names) and decoded JSON."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method)
        request.add_header("Content-Type", "application/json")
        request.add_header("Authorization", "Bearer sk-local")
        for name, value in (headers or {}).items():
            request.add_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as answer:
                return answer.status, _lower(answer.headers.items()), _json(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _lower(error.headers.items()), _json(error.read())

    def engines(self) -> dict[str, dict[str, Any]]:
        """Statistics by role."""
        engines: dict[str, dict[str, Any]] = self.get("/v1/engines")["engines"]
        return engines

    def blocks_in_use(self) -> dict[str, int]:
        return {role: int(stats.get("num_blocks_in_use", 0)) for role, stats in self.engines().items()}

    def engine_pids(self) -> dict[str, int]:
        """Process id by role, from the process table."""
        pids: dict[str, int] = {}
        for pid in descendants(self.process.pid):
            command = _command_line(pid)
            if "backends" in command:
                role = self._role_of(pid)
                if role:
                    pids[role] = pid
        return pids

    def _role_of(self, pid: int) -> str | None:
        ready = self.call("GET", "/ready")[2]
        return _find_role(ready, pid)

    def wait_ready(self, seconds: float = DEADLINE_SECONDS) -> None:
        def ready() -> bool:
            self._find_url()
            status, _, body = self.call("GET", "/ready")
            return status == 200 and not any(state != "ready" for state in _find_states(body))

        wait_until(ready, f"every instance is ready; log:\n{self.log}", seconds)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.returncode


StartGateway = Callable[..., AbstractContextManager[GatewayProcess]]


def _lower(items: Sequence[tuple[str, str]] | Any) -> dict[str, str]:
    return {name.lower(): value for name, value in items}


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode()


def _find_role(value: Any, pid: int) -> str | None:
    """The role of the instance with this process id, wherever /ready puts it."""
    if isinstance(value, dict):
        if value.get("pid") == pid and "role" in value:
            return str(value["role"])
        for key, inner in value.items():
            if isinstance(inner, dict) and inner.get("pid") == pid:
                return str(inner.get("role", key))
            found = _find_role(inner, pid)
            if found:
                return found
    if isinstance(value, list):
        for inner in value:
            found = _find_role(inner, pid)
            if found:
                return found
    return None


def _find_states(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("state"), str):
            yield value["state"]
        for key, inner in value.items():
            if key != "variants":  # they are started on demand
                yield from _find_states(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _find_states(inner)


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, from /proc."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children") if Path(f"/proc/{pid}").exists() else ():
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """A process that has ended and waits for its parent to look at it is none that runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


@contextmanager
def running_gateway(config: str, folder: Path, *arguments: str) -> Iterator[GatewayProcess]:
    """Serve with the given TOML on a free port; stopped at the end, whatever happens."""
    path = folder / "kvgate.toml"
    path.write_text(config)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_SERVER")}
    environ["PYTHONUNBUFFERED"] = "1"
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "serve", "--config", str(path), "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
    )
    gateway = GatewayProcess(process)
    try:
        yield gateway
    finally:
        gateway.stop()
