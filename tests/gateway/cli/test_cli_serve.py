"""Listening, starting, stopping and logging of `kvgate serve`, with a scripted application."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from aiohttp import web

from gateway.cli.listening import CannotListen, bind_sockets, close_all, url_of
from gateway.cli.logs import RedactingFormatter
from gateway.cli.main import main
from gateway.cli.serve import serve, start_line
from gateway.settings.importers import LoadedSettings, load_settings
from gateway.settings.schema import Settings


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


def test_a_taken_port_is_refused_with_a_hint_and_never_replaced(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=f"port {port} on 127.0.0.1 is in use"):
            bind_sockets("127.0.0.1", port)
        assert main(["serve", "--port", str(port), "--upstream", "http://127.0.0.1:9"]) == 1
    assert "choose another with --port" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["a..b", "203.0.113.7"])
def test_an_address_that_is_not_ours_is_refused(host):
    with pytest.raises(CannotListen, match=r"not an address of this machine|has no address"):
        bind_sockets(host, 0)


def test_all_addresses_of_a_name_share_one_port():
    sockets = bind_sockets("localhost", 0)
    try:
        assert len({bound.getsockname()[1] for bound in sockets}) == 1
    finally:
        close_all(sockets)


def test_a_port_can_be_taken_again_right_after_a_connection_on_it():
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
