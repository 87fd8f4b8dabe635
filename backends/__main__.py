"""`python -m backends`: one engine instance, started by the gateway. Sets threads before anything heavy is imported."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import NoReturn

import msgspec

from backends.config import EngineConfig
from backends.protocol.framing import Encoder
from backends.protocol.garbage import keep_what_is_there
from backends.protocol.messages import StartFailed
from backends.server.control import die_with_parent

EXAMPLE = """\
One engine instance. The gateway starts it with two connected sockets, so by hand it needs a parent that makes them:

  import socket, subprocess, sys
  gateway, a = socket.socketpair(); control, b = socket.socketpair()
  config = b'{"role": "merged", "model": "smollm2", "num_threads": 2}'
  subprocess.run([sys.executable, "-m", "backends", "--config", "-", "--gateway-fd", str(a.fileno()),
                  "--control-fd", str(b.fileno())], pass_fds=[a.fileno(), b.fileno()], input=config)

It answers on `gateway` with the frames of backends.protocol, and exits when `control` is closed.
`python -m backends model --help` fetches, lists and locates models.
"""

EXIT_BAD_CONFIG = 2
logger = logging.getLogger("backends")


def main(argv: list[str]) -> int:
    if argv[:1] == ["model"]:
        from backends.models.cli import main as model_main  # noqa: PLC0415 - not needed by an instance

        return model_main(argv[1:])
    arguments = _parse(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the gateway decides what it means
    die_with_parent()
    gateway = socket.socket(fileno=arguments.gateway_fd)
    control = socket.socket(fileno=arguments.control_fd)
    for sock in (gateway, control):
        sock.set_inheritable(False)
    try:
        config = _read_config(arguments.config)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        gateway.sendall(Encoder().encode(StartFailed(message=f"The engine's configuration is not valid: {error}")))
        return EXIT_BAD_CONFIG
    _set_up_logging(config)
    set_threads(config, os.environ)
    from backends.server.process import run_instance  # noqa: PLC0415 - after the threads are set

    return asyncio.run(run_instance(config, gateway, control, built=keep_what_is_there))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m backends", description=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="an EngineConfig as JSON; - = standard input")
    parser.add_argument("--gateway-fd", required=True, type=int, metavar="N", help="socket to the gateway: frames")
    parser.add_argument("--control-fd", required=True, type=int, metavar="M", help="socket whose end ends this process")
    return parser.parse_args(argv)


def _read_config(file: str) -> EngineConfig:
    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    return msgspec.json.decode(data, type=EngineConfig)


def _set_up_logging(config: EngineConfig) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=os.environ.get("KVGATE_LOG_LEVEL", "INFO").upper(),
        format=f"%(asctime)s %(levelname)s {config.name or config.role}[{os.getpid()}] %(name)s: %(message)s",
    )


def set_threads(config: EngineConfig, environ: MutableMapping[str, str]) -> None:
    """OpenMP and MKL read these once, when torch is imported.

    By default a thread that waits for the others spins for long. The instances share their cores with each other and
    with the rest of the machine, and there the spinning takes the time that the awaited thread needs: on two busy
    cores a token took 285 ms instead of 21 ms. Not spinning at all costs a sleep and a wake-up at each of the 180
    barriers of a decode step: 7.1 ms a token instead of 2.5. So they spin for about as long as a step's own gaps.
    What the user has set wins.
    """
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", "50000")
        environ.setdefault("KMP_BLOCKTIME", "1")  # milliseconds; the same for LLVM's OpenMP
    if config.num_threads is not None:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            environ[name] = str(config.num_threads)


def _exit(code: int) -> NoReturn:
    """Leave without waiting for daemon threads or unloading torch: nothing of ours is left to write."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _exit(main(sys.argv[1:]))
