"""What commands that start servers share at a terminal: signals that end the run in order, and where results go."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TextIO

from gateway.bench.options import STDOUT, CompareError
from gateway.bench.process import BenchError

EXIT_CLEAN, EXIT_FAILED, EXIT_CANNOT, EXIT_INTERRUPTED = 0, 1, 2, 130


def run_interruptible(command: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """The command's exit code. Ctrl-C, SIGTERM and SIGHUP stop the servers that run before this ends."""
    try:
        return asyncio.run(_interruptible(command))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.stderr.write("\nkvgate bench: interrupted; every server it started is stopped, nothing was compared\n")
        return EXIT_INTERRUPTED


async def _interruptible(command: Callable[[], Coroutine[Any, Any, int]]) -> int:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await command()


def check_target(target: str | None) -> None:
    """Refuse a file that can't be written now, not after the whole run."""
    if target not in {None, STDOUT} and (Path(str(target)).is_dir() or not Path(str(target)).parent.is_dir()):
        raise CompareError(f"--json {target}: not a file in an existing folder")


def write_result(target: str | None, *, document: str, table: str, stdout: TextIO) -> None:
    """The file first, so a table on the screen means that it is written."""
    if target not in {None, STDOUT}:
        try:
            Path(str(target)).write_text(document, encoding="utf-8")
        except OSError as error:
            stdout.write(table)  # a run of many minutes isn't thrown away
            raise BenchError(f"results can't be written to {target}: {error.strerror}") from None
    stdout.write(document if target == STDOUT else table)
