"""`kvgate bench`: this project and other engines on this machine, measured alike. Starts and stops every server itself.

What it imports at the top is light, so `kvgate --help` stays fast.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.bench.engines.install import PEERS, install_all
from gateway.bench.environments import DEFAULT_FOLDER
from gateway.bench.options import STDOUT, CompareError
from gateway.cli import bench_gateway
from gateway.cli.choices import chosen
from gateway.cli.compare import seconds_number, whole_number
from gateway.cli.progress import ProgressBar

if TYPE_CHECKING:
    from gateway.bench.engines.command import BenchJob

SUMMARY = "measure the bundled engine and other engines on this machine, one table"
EXIT_BAD_OPTIONS = 2
VLLM_VARIABLE, LLAMA_VARIABLE = "KVGATE_BENCH_VLLM", "KVGATE_BENCH_LLAMA"
NEEDED = ("torch", "transformers", "safetensors")

EPILOG = """\
rows (--rows takes a comma-separated choice)
  decode        tokens/s of one stream after a 32-token prompt
  decode-long   the same after 4,096 tokens
  prefill       prompt tokens / TTFT, 1,024 tokens
  prefill-long  the same with 4,096 tokens
  load          output tokens/s, 8 at once, 256 in / 64 out, 16 requests in a closed loop
  load-long     prompt and output tokens/s, 8 at once, 1,024 in / 64 out
  stall         p99 of the gaps between pieces of text of 4 running streams while a 4,096-token prompt is computed
                (sent -> its first token), and of the same streams just before
  prefix        TTFT of a second request with the same 4,096-token prefix, as a share of the first's
  memory        resident memory (RSS, PSS) of the process that holds the model, after the other rows

Servers run one at a time: kvgate (merged alone), each peer, kvgate again. All get every core, the same weights, the
same random token ids as prompts, temperature 0 and ignore_eos. vLLM serves bf16; llama.cpp reads the GGUF file the
bundled model was converted from, and answers one request at a time. Figures move from run to run: compare the ratios.
The roofline is memory speed (decode) and bf16 matrix products (prefill), both measured at the start.
Options of the bundled engine can be tried through the environment: KVGATE_ENGINE__WEIGHT_DTYPE=bf16 kvgate bench

Peers are looked for in .peers/vllm and .peers/llama, or where --vllm, --llama, KVGATE_BENCH_VLLM and
KVGATE_BENCH_LLAMA say. `kvgate bench --install` (make bench-peers) puts them there.

exit code: 0 everything was measured, 1 something failed, 2 nothing could be measured, 130 interrupted

examples
  kvgate bench --quick                        a smoke run with small sizes, a minute or two
  kvgate bench --json bench.json              everything, a quarter of an hour with both peers
  kvgate bench --rows decode,stall --peers vllm --repeats 5
  kvgate bench --peers none --rows decode     this project alone
  kvgate bench --install vllm                 3.5 GB into .peers/vllm
  kvgate bench gateway --help                 what this gateway and others add to an upstream
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help=SUMMARY,
        description=SUMMARY,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="smollm2", help="what the bundled engine loads (default: %(default)s)")
    add("--rows", default="all", help="comma-separated, see below (default: %(default)s)")
    add("--peers", default="all", help=f"comma-separated among {', '.join(PEERS)}, or none (default: %(default)s)")
    add("--repeats", type=whole_number, default=3, metavar="N", help="of each row; medians (default: %(default)s)")
    add("--quick", action="store_true", help="one repeat with small sizes: shows that everything works, not how fast")
    add("--seed", type=int, default=1, help="of the prompts (default: %(default)s)")
    add("--vllm", type=Path, metavar="DIR", help=f"vLLM's virtual environment (default: ${VLLM_VARIABLE})")
    add("--llama", type=Path, metavar="DIR", help=f"llama-cpp-python's (default: ${LLAMA_VARIABLE})")
    add("--ready-timeout", type=seconds_number, default=600.0, metavar="SECONDS", help="(default: %(default)g)")
    add("--json", nargs="?", const=STDOUT, metavar="FILE", help="every raw value; without FILE, on stdout alone")
    add("--install", nargs="?", const="all", metavar="PEERS", help="install peers (all), and measure nothing")
    add(
        "--install-to", type=Path, default=DEFAULT_FOLDER, metavar="DIR", help="of peers, and where they are looked for"
    )
    bench_gateway.add_parser(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The whole command. Returns the exit code; --help lists them."""
    try:
        if arguments.install is not None:
            return install_all(chosen("--install", arguments.install, tuple(PEERS)), arguments.install_to)
        job = job_from(arguments)
    except CompareError as error:
        sys.stderr.write(f"kvgate bench: {error}\n")
        return EXIT_BAD_OPTIONS
    from gateway.bench.engines.command import run_job  # noqa: PLC0415 - aiohttp, needed by no other command

    return run_job(job, ProgressBar(sys.stderr, forced=True))


def job_from(arguments: argparse.Namespace) -> BenchJob:
    """Checked arguments, or CompareError naming the flag at fault."""
    from gateway.bench.engines.command import BenchJob  # noqa: PLC0415
    from gateway.bench.engines.figures import ROWS  # noqa: PLC0415
    from gateway.bench.terminal import check_target  # noqa: PLC0415

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise CompareError(f"the bundled engine needs {', '.join(missing)}: pip install 'kvgate[engine]'")
    check_target(arguments.json)
    return BenchJob(
        model=arguments.model,
        rows=chosen("--rows", arguments.rows, ROWS),
        peers=() if arguments.peers == "none" else chosen("--peers", arguments.peers, tuple(PEERS)),
        num_repeats=arguments.repeats,
        is_quick=arguments.quick,
        seed=arguments.seed,
        ready_seconds=arguments.ready_timeout,
        vllm=arguments.vllm or _folder_from(VLLM_VARIABLE),
        llama=arguments.llama or _folder_from(LLAMA_VARIABLE),
        peer_root=arguments.install_to,
        json_target=arguments.json,
    )


def _folder_from(variable: str) -> Path | None:
    folder = os.environ.get(variable, "").strip()
    return Path(folder).expanduser() if folder else None
