"""Listening, starting, stopping and logging of `kvgate serve`, with a scripted application."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from aiohttp import web

from gateway.cli.listening import CannotListen, bind_sockets, close_all, explain, url_of
from gateway.cli.logs import RedactingFormatter
from gateway.cli.main import main
from gateway.cli.serve import serve, start_line
from gateway.settings.importers import LoadedSettings, load_settings
from gateway.settings.schema import Settings
from gateway.web.generation import ReloadState
from gateway.web.keys import RELOADER


class ScriptedApp:
    """An application that says when its handler begins and how it ends."""

    def __init__(self, *, starts: bool = True) -> None:
        self.starts = starts
        self.started = asyncio.Event()
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.cleaned = False

    def __call__(self, settings: Settings, *, notices: Sequence[str] = ()) -> web.Application:
        app = web.Application()
        app.router.add_get("/", self.handle)
        app.on_startup.append(self.start)
        app.on_cleanup.append(self.clean)
        return app

    async def start(self, app: web.Application) -> None:
        self.started.set()
        if not self.starts:
            await asyncio.Event().wait()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError

    async def clean(self, app: web.Application) -> None:
        self.cleaned = True


@pytest.fixture
def loaded() -> LoadedSettings:
    return load_settings(None, environ={}, flags={"server.port": 0, "server.api_base": "https://taotoken.net/api"})


async def test_a_client_that_leaves_cancels_its_handler_and_a_signal_stops_the_server(loaded, capsys):
    app, sockets = ScriptedApp(), bind_sockets("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    server = asyncio.create_task(serve(sockets, loaded, app))
    async with asyncio.timeout(10):
        await app.started.wait()
        writer = await connect(port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await app.begun.wait()
        writer.close()
        await app.cancelled.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await server == 0
    line = capsys.readouterr().out
    assert f"http://127.0.0.1:{port} | targets: upstream (https://taotoken.net/api) | default mode: merged" in line
    assert app.cleaned


async def connect(port: int) -> asyncio.StreamWriter:
    """The socket is bound before it listens, so the first tries may be refused."""
    while True:
        try:
            return (await asyncio.open_connection("127.0.0.1", port))[1]
        except ConnectionRefusedError:
            await asyncio.sleep(0)


async def test_a_signal_while_starting_ends_the_start(loaded, capsys):
    app, sockets = ScriptedApp(starts=False), bind_sockets("127.0.0.1", 0)
    server = asyncio.create_task(serve(sockets, loaded, app))
    async with asyncio.timeout(10):
        await app.started.wait()
        os.kill(os.getpid(), signal.SIGINT)
        assert await server == 0
    close_all(sockets)
    assert capsys.readouterr().out == ""


class ReloadableApp(ScriptedApp):
    """It starts when it is let, and counts how often its settings were to be read again."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.asked = asyncio.Event()
        self.state = ReloadState(1, 0.0)

    async def start(self, app: web.Application) -> None:
        await super().start(app)
        await self.go.wait()
        app[RELOADER] = self

    def ask(self) -> None:
        self.asked.set()


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
async def test_sighup_while_starting_ends_nothing_and_is_heeded_once_started(loaded):
    app, sockets = ReloadableApp(), bind_sockets("127.0.0.1", 0)
    server = asyncio.create_task(serve(sockets, loaded, app))
    async with asyncio.timeout(10):
        await app.started.wait()
        os.kill(os.getpid(), signal.SIGHUP)
        app.go.set()
        await app.asked.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await server == 0


def test_lc_04_a_taken_port_is_refused_with_a_hint_and_never_replaced(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=f"port {port} on 127.0.0.1 is in use"):
            bind_sockets("127.0.0.1", port)
        assert main(["serve", "--port", str(port), "--upstream", "http://127.0.0.1:9"]) == 1
    assert "choose another with --port" in capsys.readouterr().err


def test_lc_04_a_second_gateway_on_the_same_port_ends_and_the_first_goes_on(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (first,) = bind_sockets("127.0.0.1", 0)
    port = first.getsockname()[1]
    first.listen()
    try:
        assert main(["serve", "--port", str(port), "--upstream", "http://127.0.0.1:9"]) == 1
        output = capsys.readouterr()
        assert f"port {port} on 127.0.0.1 is in use" in output.err
        assert "http://" not in output.out, "it told of an address though it listens nowhere"
        socket.create_connection(("127.0.0.1", port)).close()
    finally:
        first.close()


@pytest.fixture
def both_families(monkeypatch: pytest.MonkeyPatch) -> str:
    """A name with an address of each family, whatever this machine's hosts file says."""
    if not has_ipv6():
        pytest.skip("no IPv6 here")
    real = socket.getaddrinfo

    def found(host: str | None, port: int, **options: int) -> list[object]:
        names = ("::1", "127.0.0.1") if host == "both" else (host,)
        return [entry for name in names for entry in real(name, port, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    return "both"


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("taken", ["127.0.0.1", "::1"])
def test_lc_04_a_port_that_is_taken_in_one_family_alone_is_taken(taken: str, both_families: str):
    """Else a client that resolves the name to the other family would talk to the other program."""
    family = socket.AF_INET6 if ":" in taken else socket.AF_INET
    with socket.create_server((taken, 0), family=family) as other:
        port = other.getsockname()[1]
        with pytest.raises(CannotListen, match=f"port {port} on both is in use"):
            bind_sockets(both_families, port)
    bound = bind_sockets(both_families, port)
    close_all(bound)
    assert [address.family for address in bound] == [socket.AF_INET6, socket.AF_INET]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EACCES, "not allowed to listen on port 80; choose one above 1023"),
        (errno.EADDRINUSE, "lsof -nP -iTCP:80"),
        (errno.ENOBUFS, "can't listen on 127.0.0.1 port 80: "),
    ],
)
def test_lc_04_a_port_that_the_system_keeps_back_is_said_with_what_to_do(number: int, words: str):
    """EACCES is also what Windows says of a range it has excluded."""
    assert words in explain(OSError(number, "no"), "127.0.0.1", 80)


@pytest.mark.parametrize("host", ["a..b", "203.0.113.7"])
def test_an_address_that_is_not_ours_is_refused(host):
    with pytest.raises(CannotListen, match=r"not an address of this machine|has no address"):
        bind_sockets(host, 0)


def test_lc_04_all_addresses_of_a_name_share_one_port():
    sockets = bind_sockets("localhost", 0)
    try:
        assert len({bound.getsockname()[1] for bound in sockets}) == 1
    finally:
        close_all(sockets)


def test_lc_04_a_port_can_be_taken_again_right_after_a_connection_on_it():
    (first,) = bind_sockets("127.0.0.1", 0)
    port = first.getsockname()[1]
    first.listen()
    with socket.create_connection(("127.0.0.1", port)):
        first.setblocking(True)
        first.accept()[0].close()  # closed by the server first: its side waits in TIME_WAIT
    first.close()
    close_all(bind_sockets("127.0.0.1", port))


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:1"), ("0.0.0.0", "http://127.0.0.1:1"), ("::", "http://[::1]:1"),
     ("::1", "http://[::1]:1"), ("localhost", "http://localhost:1")],
)  # fmt: skip
def test_the_printed_url_can_be_used(host, url):
    assert url_of(host, 1) == url


def test_the_start_line_names_url_targets_modes_and_default():
    settings = Settings.model_validate(
        {"engine": {}, "server": {"api_base": "http://u"}, "cache_layout": {"mode": "split"},
         "targets": [{"name": "t", "base_url": "http://t"}]}
    )  # fmt: skip
    line = start_line(settings, "http://127.0.0.1:1", str(Path("kvgate.toml")))
    assert line == (
        "kvgate listens on http://127.0.0.1:1 | targets: local (smollm2: merged, split), upstream (http://u), t (http://t)"
        " | default mode: split | settings: kvgate.toml"
    )


def test_the_log_shows_no_secret_not_even_in_a_traceback():
    formatter = RedactingFormatter("%(message)s", ["sk-fake-0000", "sk-fake-0000-longer", "x"])
    try:
        raise ValueError("Bearer sk-fake-0000-longer")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("n", logging.INFO, "p", 1, "key %s of x", ("sk-fake-0000",), info)
    text = formatter.format(record)
    assert "sk-fake" not in text
    assert text.startswith("key *** of x")
    assert "Bearer ***" in text
    assert "-longer" not in text
