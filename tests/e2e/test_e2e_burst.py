"""Far more connections at once than files may be open: every client gets an answer in HTTP, none is cut."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.gateway_process import GatewayProcess

NUM_CLIENTS = 300
MAX_FILES = 128  # a hard limit, which the gateway can't raise
RUN = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({MAX_FILES}, {MAX_FILES}))
from gateway.cli.main import main
raise SystemExit(main())
"""
CONFIG = '[engine]\nmodel = "scripted:delay=0.001"\nserved_name = "words"\nmodes = ["merged"]\n'
BODY = b'{"model":"words","max_tokens":20,"messages":[{"role":"user","content":"many words"}]}'
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and a hard limit of open files")


@pytest.fixture
def small_gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    path = tmp_path / "kvgate.toml"
    path.write_text(CONFIG)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}
    command = [sys.executable, "-c", RUN, "serve", "--config", str(path), "--port", "0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.getcwd()},
    )
    gateway = GatewayProcess(process)
    try:
        gateway.wait_ready()
        yield gateway
    finally:
        gateway.stop()


async def test_lc_06_a_burst_beyond_the_limit_of_open_files_is_answered_without_a_reset(small_gateway: GatewayProcess):
    port = int(small_gateway.url.rpartition(":")[2])

    async with asyncio.timeout(60):
        answers = await asyncio.gather(*(one(port) for _ in range(NUM_CLIENTS)))

    statuses = Counter(answer.partition(b"\r\n")[0].split(b" ")[1] for answer in answers)
    assert set(statuses) <= {b"200", b"429", b"503"}, statuses
    assert statuses[b"200"] > 0
    for answer in answers:
        head, _, body = answer.partition(b"\r\n\r\n")
        if b" 200 " not in head.partition(b"\r\n")[0]:
            assert b'"error"' in body
            assert re.search(rb"\r\nRetry-After: \d+", head)
    assert small_gateway.call("POST", "/v1/chat/completions", BODY)[0] == 200
    assert "no file descriptor is left" in small_gateway.log, "the limit was not reached"
    assert small_gateway.log.count("Traceback") == 0


async def one(port: int) -> bytes:
    """The whole answer; raises if the connection is reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST)
    try:
        return await reader.read()
    finally:
        writer.close()
