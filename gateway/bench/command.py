"""One comparison from options to written results: opens the session, runs, writes, and says how it went."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TextIO

import aiohttp

from gateway.bench.client import GatewayClient, normal_url
from gateway.bench.export import to_csv, to_json
from gateway.bench.options import STDOUT, CompareError, Job, WrongMode
from gateway.bench.report import render
from gateway.bench.rows import Comparison
from gateway.bench.runner import Clocks, Progress, Runner
from gateway.bench.summary import Summary, summarise

EXIT_CLEAN, EXIT_FAILED_REQUESTS, EXIT_CANNOT, EXIT_WRONG_MODE, EXIT_INTERRUPTED = 0, 1, 2, 3, 130


def run_job(job: Job, progress: Progress) -> int:
    """`execute` from a terminal. Ctrl-C closes the streams that are open, which aborts their requests."""
    try:
        return asyncio.run(execute(job, progress, stdout=sys.stdout, stderr=sys.stderr))
    except KeyboardInterrupt:
        sys.stderr.write("kvgate compare: interrupted, nothing was compared\n")
        return EXIT_INTERRUPTED


async def execute(job: Job, progress: Progress, *, stdout: TextIO, stderr: TextIO, clocks: Clocks | None = None) -> int:
    """The exit code. Results are written even if requests failed, so that the failures can be looked at."""
    try:
        comparison = await _run(job, progress, clocks)
        summary = summarise(comparison, job.options.modes, seed=job.options.seed)
        _write(job, comparison, summary, stdout)
    except CompareError as error:
        stderr.write(f"kvgate compare: {error}\n")
        return EXIT_WRONG_MODE if isinstance(error, WrongMode) else EXIT_CANNOT
    return EXIT_CLEAN if summary.is_clean else EXIT_FAILED_REQUESTS


async def _run(job: Job, progress: Progress, clocks: Clocks | None) -> Comparison:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)  # aiohttp's default cuts answers of 5 minutes
    connector = aiohttp.TCPConnector(limit=0)  # a limit would queue requests after the clock has started
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        client = GatewayClient(session, job.url, job.key)
        return await Runner(client, job.options, progress, clocks).run()


def _write(job: Job, comparison: Comparison, summary: Summary, stdout: TextIO) -> None:
    """Files first, so a table on the screen means that they are written."""
    url = normal_url(job.url)
    written = [(job.json_target, to_json(comparison, summary, job.options, url)), (job.csv_target, to_csv(comparison))]
    for target, text in written:
        if target is not None and target != STDOUT:
            _write_file(Path(target), text)
    on_stdout = [text for target, text in written if target == STDOUT]
    stdout.write(on_stdout[0] if on_stdout else render(comparison, summary, job.options, url))


def _write_file(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CompareError(f"results can't be written to {path}: {error.strerror}") from None
