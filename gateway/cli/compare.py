"""`kvgate compare`: the same requests in merged and in split, and one table. A client of a running gateway.

What it imports at the top is light, so `kvgate --help` stays fast.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from gateway.bench.explanation import EXPLANATION
from gateway.bench.options import STDOUT, CompareError, CompareOptions, Job, Warmth
from gateway.cli.progress import ProgressBar
from gateway.core.spelling import parse_mode
from gateway.core.types import CacheMode

NAME = "compare"
SUMMARY = "send the same requests in merged and in split, and show what differs"
DEFAULT_URL = "http://127.0.0.1:8000"

EXIT_BAD_OPTIONS = 2


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command; `run` is called with the parsed arguments."""
    parser = commands.add_parser(
        NAME,
        help=SUMMARY,
        description=SUMMARY,
        epilog=EXPLANATION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of the command."""
    add = parser.add_argument
    add("--url", default=DEFAULT_URL, help="the gateway (default: %(default)s)")
    add("--key", help="the gateway's key; better in the environment as KVGATE_KEY. Never printed")
    add("--model", help="default: the first model of /v1/models that serves the modes")
    add("--modes", default="merged,split", help="comma-separated, first round's order (default: %(default)s)")
    add("--prompt-tokens", type=whole_number, metavar="N", help="exact length, random token ids (default: 512)")
    add("--prompt-file", type=Path, metavar="FILE", help="text to send in place of token ids")
    add("--output-tokens", type=whole_number, default=64, metavar="N", help="of every answer (default: %(default)s)")
    add("--requests", type=whole_number, default=16, metavar="N", help="per mode and round (default: %(default)s)")
    add("--concurrency", type=whole_number, default=1, metavar="N", help="requests in flight (default: %(default)s)")
    add("--rounds", type=whole_number, default=2, metavar="N", help="order of modes alternates (default: %(default)s)")
    add("--seed", type=int, default=0, help="of prompts and intervals (default: %(default)s)")
    add("--cache", choices=("cold", "warm"), default="cold", help="state of the prefix caches (default: %(default)s)")
    add(
        "--timeout", type=seconds_number, default=600.0, metavar="SECONDS", help="of one request (default: %(default)g)"
    )
    add("--json", nargs="?", const="-", metavar="FILE", help="everything incl. raw rows; without FILE, on stdout alone")
    add("--csv", nargs="?", const="-", metavar="FILE", help="a line per request; without FILE, on stdout alone")
    add("--progress", action="store_true", help="show progress on stderr even if it is no terminal")


def run(arguments: argparse.Namespace) -> int:
    """The whole command. Returns the exit code; the explanation in --help lists them."""
    try:
        job = job_from(arguments)
    except CompareError as error:
        sys.stderr.write(f"kvgate compare: {error}\n")
        return EXIT_BAD_OPTIONS
    from gateway.bench.command import run_job  # noqa: PLC0415 - aiohttp, needed by no other command

    return run_job(job, ProgressBar(sys.stderr, forced=arguments.progress))


def job_from(arguments: argparse.Namespace) -> Job:
    """Checked arguments, or CompareError naming the flag at fault."""
    if arguments.json == STDOUT and arguments.csv == STDOUT:
        raise CompareError("--json and --csv can't both go to stdout: give one of them a FILE")
    for flag, target in (("--json", arguments.json), ("--csv", arguments.csv)):
        if target not in {None, STDOUT} and (Path(target).is_dir() or not Path(target).parent.is_dir()):
            raise CompareError(f"{flag} {target}: not a file in an existing folder")  # now, not after the whole run
    return Job(
        options=options_from(arguments),
        url=arguments.url,
        key=arguments.key if arguments.key is not None else os.environ.get("KVGATE_KEY"),
        json_target=arguments.json,
        csv_target=arguments.csv,
    )


def options_from(arguments: argparse.Namespace) -> CompareOptions:
    if arguments.prompt_file is not None and arguments.prompt_tokens is not None:
        raise CompareError("--prompt-tokens and --prompt-file exclude each other: a file has the length it has")
    return CompareOptions(
        model=arguments.model,
        modes=modes_from(arguments.modes),
        prompt_tokens=arguments.prompt_tokens or CompareOptions().prompt_tokens,
        output_tokens=arguments.output_tokens,
        num_requests=arguments.requests,
        concurrency=arguments.concurrency,
        num_rounds=arguments.rounds,
        seed=arguments.seed,
        warmth=Warmth(arguments.cache),
        prompt_text=None if arguments.prompt_file is None else read_prompt(arguments.prompt_file),
        timeout_seconds=arguments.timeout,
    )


def modes_from(text: str) -> tuple[CacheMode, ...]:
    """One or two modes, each at most once, in any accepted spelling."""
    try:
        modes = tuple(parse_mode(name) for name in text.split(","))
    except ValueError as error:
        raise CompareError(f"--modes {text!r}: each {error}") from None
    if len(set(modes)) != len(modes):
        raise CompareError(f"--modes {text!r} names a mode twice")
    return modes


def read_prompt(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise CompareError(f"--prompt-file {path} can't be read as UTF-8 text: {error}") from None
    if not text.strip():
        raise CompareError(f"--prompt-file {path} is empty")
    return text


def whole_number(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def seconds_number(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text}")
    return seconds
