"""The real client programs from npm: pointed at a gateway by `kvgate connect --write`, run once, their output read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

BIN = Path(__file__).parent / "node_modules" / ".bin"
RUN_SECONDS = 240.0
MUST_RUN = os.environ.get("CLIENTS_MUST_RUN") == "1"  # a missing program is then a failure, not a skip

# What a client may find in its environment: no key, proxy or setting of whoever runs the tests.
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TERM", "TMPDIR")
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "CI": "1",
    "NO_COLOR": "1",
}


@dataclass(frozen=True)
class Program:
    """One client: its command line for a prompt, and what it says of the answer."""

    name: str  # as `kvgate connect` knows it
    command: Callable[[str, str], list[str]]  # (prompt, model) -> arguments after the program
    answer: Callable[[str], str]  # standard output -> the model's last words
    may_fail_after_answer: bool = False  # it takes an answer that ends at the token limit for an error, having told it


def _last_words_of_cline(output: str) -> str:
    events = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    results = [event for event in events if event.get("type") == "run_result"]
    assert results, output[-2000:]
    return str(results[-1]["text"])


def _text_of_claude(output: str) -> str:
    """All text of all its messages: one that ends at the token limit is told before the error."""
    events = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    blocks = [block for event in events if event["type"] == "assistant" for block in event["message"]["content"]]
    return "".join(block["text"] for block in blocks if block["type"] == "text")


PROGRAMS = {
    "cline": Program(
        "cline",
        lambda prompt, model: ["-P", "openai-compatible", "-m", model, "--json", prompt],
        _last_words_of_cline,
    ),
    "claude": Program(
        "claude",
        lambda prompt, _: ["-p", prompt, "--allowedTools", "Read", "--output-format", "stream-json", "--verbose"],
        _text_of_claude,
        may_fail_after_answer=True,
    ),
    "codex": Program(
        "codex",
        lambda prompt, _: ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", prompt],
        str.strip,
    ),
    "opencode": Program("opencode", lambda prompt, _: ["run", prompt], str.strip),
}


def program(name: str) -> Program:
    """The program, or a skip where it isn't installed."""
    if not (BIN / name).exists():
        reason = f"{name} is not installed: make tests/clients/node_modules/.installed"
        pytest.fail(reason) if MUST_RUN else pytest.skip(reason)
    return PROGRAMS[name]


def connect(
    name: str, home: Path, *, url: str, model: str, mode: str | None = None, max_output: int | None = None
) -> None:
    """What a user does first: `kvgate connect NAME --write`, in a home folder of its own."""
    arguments = [name, "--write", "--home", str(home), "--url", url, "--model", model, "--key", "sk-local"]
    arguments += ["--mode", mode] if mode else []
    arguments += ["--max-output", str(max_output)] if max_output else []
    command = [sys.executable, "-m", "gateway", "connect", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


async def run_program(client: Program, prompt: str, *, home: Path, folder: Path, model: str) -> str:
    """Its last words. Fails with all of its output if it ends with an error or doesn't end."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        str(BIN / client.name),
        *client.command(prompt, model),
        cwd=folder,
        env={**kept, **QUIET, "HOME": str(home)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), RUN_SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        end_daemons(home)
    told = out.decode(errors="replace") + "\n--- stderr ---\n" + err.decode(errors="replace")[-4000:]
    assert process.returncode == 0 or client.may_fail_after_answer, told
    answer = client.answer(out.decode())
    assert answer, told
    return answer


def end_daemons(home: Path) -> None:
    """Processes that the client left running, known by their home folder."""
    mark = f"HOME={home}".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            if mark in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)
