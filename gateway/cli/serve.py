"""`kvgate serve`: settings, sockets, application, signals. Knows nothing of requests."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from backends.protocol.garbage import keep_what_is_there
from backends.protocol.model_names import is_scripted, problem_of
from gateway.cli.listening import BACKLOG, CannotListen, bind_sockets, close_all, explain, url_of
from gateway.cli.loading import load
from gateway.cli.logs import LEVELS, set_up_logging
from gateway.cli.open_files import raise_open_file_limit
from gateway.cli.reload_signal import ReloadSignal

if TYPE_CHECKING:
    from aiohttp import web

    from gateway.reloading import Source
    from gateway.settings.importers import LoadedSettings
    from gateway.settings.schema import Settings

SUMMARY = "run the gateway"
EPILOG = """\
Without --config, $KVGATE_CONFIG is read, else ./kvgate.toml if there is one. Flags win over KVGATE_* environment
variables (such as KVGATE_SERVER__PORT), these over the file. All of it is read again when the file changes, and on
SIGHUP; running answers are left alone.

examples:
  kvgate serve --port 9000 --mode split
  kvgate serve --model ./Qwen3-0.6B
  kvgate serve --upstream https://taotoken.net/api --upstream-key-env TAOTOKEN_API_KEY
"""
LOG_LEVEL_VARIABLE = "KVGATE_LOG_LEVEL"

logger = logging.getLogger(__name__)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help=SUMMARY,
        description=SUMMARY,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="settings file, in any accepted shape")
    add("--host", help="address to listen on (default: 127.0.0.1)")
    add("--port", help="port to listen on; 0 = any free one (default: 8000)")
    add("--model", help="what the bundled engine loads: bundled name, folder, GGUF file or hub id; turns it on")
    add("--mode", help="mode of requests that choose none: merged or split")
    add("--upstream", metavar="URL", help="base URL of an OpenAI-compatible upstream, such as TaoToken")
    holds_key = "name of the environment variable that holds the upstream's key"
    add("--upstream-key-env", metavar="NAME", type=_variable_name, help=holds_key)
    add("--no-engine", action="store_true", help="do not run the bundled engine")
    add("--log-level", choices=LEVELS, help=f"default: ${LOG_LEVEL_VARIABLE}, else info")
    parser.set_defaults(run=run)


def _variable_name(text: str) -> str:
    """A key in its place would stand in the list of processes, and is not repeated here."""
    if text and not (text.isascii() and text.isidentifier()):
        raise argparse.ArgumentTypeError("needs the name of a variable, such as TAOTOKEN_API_KEY, not the key itself")
    return text


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code."""
    reload_signal = ReloadSignal()
    loaded = load(arguments.config, flags_of(arguments))
    if loaded is None:
        return 1
    problem = missing_package(loaded.settings) or too_many_instances(loaded.settings) or no_model(loaded.settings)
    if problem is not None:
        print(f"kvgate: {problem}", file=sys.stderr)
        return 1
    _set_up_logging(arguments.log_level, loaded)
    raise_open_file_limit()
    server = loaded.settings.server
    try:
        sockets = bind_sockets(server.host, server.port)
    except CannotListen as error:
        print(f"kvgate: {error}", file=sys.stderr)
        return 1
    return _serve_on(sockets, loaded, source_of(arguments, loaded), reload_signal)


def flags_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options as flags give them. A key is only ever named, so that it is in no process list."""
    key_variable = arguments.upstream_key_env
    return {
        "server.host": arguments.host,
        "server.port": arguments.port,
        "server.api_base": arguments.upstream,
        "server.api_key": f"${{{key_variable}}}" if key_variable else None,
        "cache_layout.mode": arguments.mode,
        "engine.model": arguments.model,
        "engine.enabled": False if arguments.no_engine else None,
    }


def source_of(arguments: argparse.Namespace, loaded: LoadedSettings) -> Source:
    """Where the settings are read again: the same file, variables and flags."""
    from gateway.cli.logs import learn_secrets  # noqa: PLC0415
    from gateway.reloading import Source  # noqa: PLC0415
    from gateway.settings.errors import SettingsError  # noqa: PLC0415
    from gateway.settings.importers import find_settings_file, load_settings  # noqa: PLC0415
    from gateway.settings.schema import secrets_of  # noqa: PLC0415

    def read() -> LoadedSettings:
        path = Path(arguments.config).expanduser() if arguments.config else find_settings_file(os.environ, Path.cwd())
        if path is not None and path.is_fifo():  # waiting for what never comes would hold up even the end
            raise SettingsError(f"{path}: is a pipe, which can be read only once; a restart reads it")
        again = load_settings(path, environ=os.environ, flags=flags_of(arguments))
        problem = missing_litellm(again.settings)
        if problem is not None:
            raise SettingsError(problem)
        return again

    return Source(loaded, read, lambda settings: learn_secrets(secrets_of(settings)))


def missing_package(settings: Settings) -> str | None:
    return missing_engine(settings) or missing_litellm(settings)


def missing_litellm(settings: Settings) -> str | None:
    """Found without importing it."""
    needing = [target.name for target in settings.targets if target.kind == "litellm"]
    if not needing or find_spec("litellm") is not None:
        return None
    return f"target {', '.join(needing)} needs the package litellm: pip install 'kvgate[litellm]'"


def missing_engine(settings: Settings) -> str | None:
    """What the bundled engine lacks on this machine, found without importing it."""
    if settings.effective_engine() is None:
        return None
    missing = [name for name in ("torch", "transformers", "safetensors") if find_spec(name) is None]
    if not missing:
        return _missing_backend(settings)
    return (
        f"the bundled engine needs {', '.join(missing)}: pip install 'kvgate[engine]'. "
        "To serve an upstream only, give --upstream URL, or --no-engine"
    )


def _missing_backend(settings: Settings) -> str | None:
    engine = settings.effective_engine()
    uses_nixl = engine is not None and "split" in engine.modes and settings.transfer.backend == "nixl"
    if not uses_nixl or any(find_spec(name) for name in ("nixl_cu13", "nixl_cu12")):
        return None
    return "transfer.backend is nixl, which is not installed: pip install 'kvgate[nixl]', or use backend local"


def too_many_instances(settings: Settings) -> str | None:
    """Why the bundled engine's instances don't fit this machine."""
    from gateway.settings.errors import SettingsError  # noqa: PLC0415
    from gateway.upstreams.engine.config import instance_plans  # noqa: PLC0415

    engine = settings.effective_engine()
    if engine is None:
        return None
    try:
        instance_plans(settings, engine)
    except SettingsError as error:
        return str(error)
    return None


def no_model(settings: Settings) -> str | None:
    """Why the bundled engine's model can't be there. Of a hub id, that shows only when an engine fetches it."""
    engine = settings.effective_engine()
    if engine is None or is_scripted(engine.model):
        return None
    problem = problem_of(engine.model)
    return None if problem is None else f"engine.model (--model): {problem}"


def start_line(settings: Settings, url: str, source: str) -> str:
    """Everything a user wants to know first, in one line."""
    engine, server = settings.effective_engine(), settings.server
    targets = [f"{engine.name} ({engine.public_name()}: {', '.join(engine.modes)})"] if engine else []
    if server.api_base:
        targets.append(f"{server.name} ({server.api_base})")
    targets += [f"{pair.name} ({pair.engine} pair)" for pair in settings.pairs]
    targets += [f"{target.name} ({target.base_url or target.kind})" for target in settings.targets]
    return (
        f"kvgate listens on {url} | targets: {', '.join(targets) or 'none'} | "
        f"default mode: {settings.cache_layout.mode} | settings: {source}"
    )


def _set_up_logging(level: str | None, loaded: LoadedSettings) -> None:
    from gateway.settings.schema import secrets_of  # noqa: PLC0415

    level = level or os.environ.get(LOG_LEVEL_VARIABLE, "").strip().lower() or "info"
    unknown = level not in LEVELS
    level = "info" if unknown else level
    os.environ[LOG_LEVEL_VARIABLE] = level.upper()  # the engines' processes read it
    set_up_logging(level, secrets_of(loaded.settings))
    if unknown:
        logger.warning("%s is not one of %s: info is used", LOG_LEVEL_VARIABLE, ", ".join(LEVELS))
    logger.info("settings: %s", describe_source(loaded))
    for line in mode_lines(loaded.settings):
        logger.info("%s", line)
    for notice in loaded.notices:
        logger.warning("%s", notice)


def mode_lines(settings: Settings) -> list[str]:
    """Each mode and what serves it, so that nobody has to guess which of the ways of splitting it is."""
    from gateway.settings.layout import kinds  # noqa: PLC0415

    default = settings.cache_layout.mode
    return [f"mode {mode}{' (default)' if mode == default else ''}: {kind}" for mode, kind in kinds(settings).items()]


def describe_source(loaded: LoadedSettings) -> str:
    return "defaults" if loaded.path is None else f"{loaded.path} ({loaded.shape})"


def _serve_on(sockets: list[socket.socket], loaded: LoadedSettings, source: Source, reload_signal: ReloadSignal) -> int:
    from gateway.app import build_app  # noqa: PLC0415  (aiohttp and everything else)

    make = partial(build_app, source=source)
    try:
        return asyncio.run(serve(sockets, loaded, make, started=keep_what_is_there, reload_signal=reload_signal))
    except CannotListen as error:
        print(f"kvgate: {error}", file=sys.stderr)
        return 1
    finally:
        close_all(sockets)


class AppFactory(Protocol):
    def __call__(self, settings: Settings, *, notices: Sequence[str] = ()) -> web.Application: ...


async def serve(
    sockets: list[socket.socket],
    loaded: LoadedSettings,
    build_app: AppFactory,
    *,
    started: Callable[[], object] = lambda: None,
    reload_signal: ReloadSignal | None = None,
) -> int:
    """Until SIGINT or SIGTERM, also while starting. The start line is printed once connections are accepted."""
    from gateway.app import make_runner  # noqa: PLC0415

    settings = loaded.settings
    stop = asyncio.Event()
    _stop_on_signals(stop)
    app = build_app(settings, notices=loaded.notices)
    reload_signal = reload_signal or ReloadSignal()
    runner = make_runner(app, shutdown_timeout=settings.timeouts.shutdown_seconds)
    try:
        if await _set_up(runner, stop):
            _heed(reload_signal, app)
            await _start_sites(runner, sockets, settings)
            url = url_of(settings.server.host, sockets[0].getsockname()[1])
            started()
            print(start_line(settings, url, describe_source(loaded)), flush=True)
            await stop.wait()
        logger.info("stopping")
    finally:
        await runner.cleanup()
    return 0


async def _set_up(runner: web.AppRunner, stop: asyncio.Event) -> bool:
    """Start everything behind the application. False: told to stop before it was done."""
    setup = asyncio.create_task(runner.setup())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({setup, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not setup.done():
        setup.cancel()
        await asyncio.gather(setup, return_exceptions=True)
        return False
    setup.result()
    return not stop.is_set()


async def _start_sites(runner: web.AppRunner, sockets: list[socket.socket], settings: Settings) -> None:
    from aiohttp import web  # noqa: PLC0415

    try:
        for bound in sockets:
            await web.SockSite(runner, bound, backlog=BACKLOG).start()
    except OSError as error:  # two that started at once may both bind, and then only one can listen
        raise CannotListen(explain(error, settings.server.host, settings.server.port)) from None


def _heed(reload_signal: ReloadSignal, app: web.Application) -> None:
    from gateway.web.keys import RELOADER  # noqa: PLC0415

    if RELOADER in app:
        reload_signal.heed(app[RELOADER].ask)


def _stop_on_signals(stop: asyncio.Event) -> None:
    """The first signal lets running requests end; a second one ends the process as it usually would."""
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        loop.remove_signal_handler(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C cancels the main task instead
            loop.add_signal_handler(number, on_signal, number)
