"""`kvgate bench gateway`: what this gateway and others add to one scripted upstream, measured alike.

What it imports at the top is light, so `kvgate --help` stays fast.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.bench.environments import DEFAULT_FOLDER
from gateway.bench.gateways.install import PEERS, install_all
from gateway.bench.options import STDOUT, CompareError
from gateway.cli.choices import chosen
from gateway.cli.compare import seconds_number, whole_number
from gateway.cli.open_files import raise_open_file_limit
from gateway.cli.progress import ProgressBar

if TYPE_CHECKING:
    from gateway.bench.gateways.command import GatewayJob

NAME = "gateway"
SUMMARY = "measure what this gateway and others add to an upstream, one table"
EXIT_BAD_OPTIONS = 2
ROW_NAMES = ("latency", "rate", "memory", "streams")

EPILOG = """\
rows (--rows takes a comma-separated choice)
  latency   time added to the first token and in all, p50 and p95, plain and streamed: one request directly and one
            through the gateway, next to each other, in random order
  rate      requests/s of 16 at once, and of the same requests directly
  memory    resident memory of all processes of the gateway after the rows above, after --requests more (both kinds in
            turn, 16 at once), and its growth (least squares over the later half)
  streams   500 streams begun at once, a chunk every 0.2 s: errors, how many were open together, when the last ended,
            and the lag of the event loop as kvgate's own /metrics says

One scripted upstream (32 words, no gap) in a process of its own answers all; gateways run one at a time: kvgate with
a client key, metrics and records on, each peer with one worker and no database, kvgate again. One client sends the
same bytes to all. Every answer is checked: a measure in which any request fails has no figure. Figures move from run
to run: compare the ratios. Options of kvgate can be tried through the environment (KVGATE_LIMITS__MAX_RECORDS=0).

Peers are looked for in .peers/gateways; `kvgate bench gateway --install` puts them there (LiteLLM 760 MB; Portkey
needs Node.js). One that is missing is a column of dashes.

exit code: 0 everything was measured, 1 something failed, 2 nothing could be measured, 130 interrupted

examples
  kvgate bench gateway --quick                a smoke run with few requests, under a minute
  kvgate bench gateway --json gateways.json   everything, a quarter of an hour with all peers
  kvgate bench gateway --peers none --rows latency,rate
  kvgate bench gateway --requests 100000 --rows rate,memory
"""


def add_parser(parent: argparse.ArgumentParser) -> None:
    """Below `kvgate bench`, whose own options mean engines: these have names of their own in the namespace."""
    before = vars(parent.parse_args([]))
    commands = parent.add_subparsers(title="other benchmarks", metavar=NAME)
    parser = commands.add_parser(
        NAME, help=SUMMARY, description=SUMMARY, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--rows",
        dest="gateway_rows",
        metavar="ROWS",
        default="all",
        help="comma-separated, see below (default: %(default)s)",
    )
    peers = f"comma-separated among {', '.join(PEERS)}, or none (default: %(default)s)"
    add("--peers", dest="gateway_peers", metavar="PEERS", default="all", help=peers)
    requests = "of the memory row (default: 20000, or 100 with --quick)"
    add("--requests", dest="gateway_requests", type=whole_number, metavar="N", help=requests)
    quick = "few requests: shows that everything works, not how fast"
    add("--quick", dest="gateway_quick", action="store_true", help=quick)
    add(
        "--seed",
        dest="gateway_seed",
        metavar="N",
        type=int,
        default=1,
        help="of orders and intervals (default: %(default)s)",
    )
    ready = "longest start of a gateway (default: %(default)g)"
    add("--ready-timeout", dest="gateway_ready_timeout", type=seconds_number, default=120.0, metavar="S", help=ready)
    target = "every raw value; without FILE, on stdout alone"
    add("--json", dest="gateway_json", nargs="?", const=STDOUT, metavar="FILE", help=target)
    install = "install peers (all), and measure nothing"
    add("--install", dest="gateway_install", nargs="?", const="all", metavar="PEERS", help=install)
    place = "of peers, and where they are looked for, in its folder gateways"
    add("--install-to", dest="gateway_install_to", type=Path, default=DEFAULT_FOLDER, metavar="DIR", help=place)
    parser.set_defaults(run=run, options_before=before)


def run(arguments: argparse.Namespace) -> int:
    """The whole command. Returns the exit code; --help lists them."""
    try:
        require_in_place(arguments)
        if arguments.gateway_install is not None:
            names = chosen("--install", arguments.gateway_install, tuple(PEERS))
            return install_all(names, arguments.gateway_install_to)
        job = job_from(arguments)
    except CompareError as error:
        sys.stderr.write(f"kvgate bench gateway: {error}\n")
        return EXIT_BAD_OPTIONS
    from gateway.bench.gateways.command import run_job  # noqa: PLC0415 - aiohttp, needed by no other command

    raise_open_file_limit()  # also for the gateways, which inherit it
    return run_job(job, ProgressBar(sys.stderr, forced=True))


def require_in_place(arguments: argparse.Namespace) -> None:
    """An option before the word `gateway` would be taken for one of `kvgate bench`, and have no effect."""
    given = [name for name, default in arguments.options_before.items() if getattr(arguments, name) != default]
    if given:
        raise CompareError(f"--{given[0].replace('_', '-')} comes after the word {NAME}: kvgate bench {NAME} ...")


def job_from(arguments: argparse.Namespace) -> GatewayJob:
    """Checked arguments, or CompareError naming the flag at fault."""
    from gateway.bench.gateways.command import GatewayJob  # noqa: PLC0415
    from gateway.bench.terminal import check_target  # noqa: PLC0415

    check_target(arguments.gateway_json)
    peers = arguments.gateway_peers
    return GatewayJob(
        rows=chosen("--rows", arguments.gateway_rows, ROW_NAMES),
        peers=() if peers == "none" else chosen("--peers", peers, tuple(PEERS)),
        num_requests=arguments.gateway_requests,
        is_quick=arguments.gateway_quick,
        seed=arguments.gateway_seed,
        ready_seconds=arguments.gateway_ready_timeout,
        peer_root=arguments.gateway_install_to,
        json_target=arguments.gateway_json,
    )
