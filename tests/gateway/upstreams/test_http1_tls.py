"""https: whose certificate is trusted, and that the rest is as without."""

from __future__ import annotations

import hashlib
import ssl

import pytest

from gateway.core.errors import UpstreamUnreachable
from gateway.settings.schema import TargetSettings, TimeoutSettings
from gateway.upstreams.base import RawRequest
from gateway.upstreams.http.clients import HttpClients
from gateway.upstreams.http.http1_errors import ConnectFailed, ConnectionCut
from gateway.upstreams.http.http1_pool import Http1Pool
from gateway.upstreams.http.openai_http import OpenAIHttpUpstream
from support.http1_server import DEADLINE_SECONDS, Peer, serving
from support.tls_certificate import server_context, trusting_context
from support.waiting import until

LARGE = bytes(range(256)) * (8 * 4096)  # 8 MiB


async def echoes(peer: Peer) -> None:
    while (request := await peer.request()) is not None:
        await peer.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(request[1]), request[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_trusted_server_gets_requests_of_any_size_over_one_connection(host):
    async with serving(echoes, tls=server_context()) as server:
        server.host = host
        pool = Http1Pool(DEADLINE_SECONDS, tls=trusting_context())
        for body in (b"hi", LARGE, b""):
            response = await pool.request("POST", server.url, {}, body)
            digest = hashlib.sha256()
            while piece := await response.read():
                digest.update(piece)
            assert digest.digest() == hashlib.sha256(body).digest()
        assert server.num_accepted == 1
        await pool.close()
        assert pool.num_connections == 0


async def test_a_certificate_that_nobody_known_has_issued_is_refused():
    async with serving(echoes, tls=server_context()) as server:
        pool = Http1Pool(DEADLINE_SECONDS)
        with pytest.raises(ConnectFailed) as failed:
            await pool.request("POST", server.url, {}, b"")
        assert isinstance(failed.value.cause, ssl.SSLCertVerificationError)
        await pool.close()


async def test_the_system_s_list_is_the_one_that_the_environment_names(monkeypatch, tmp_path):
    path = tmp_path / "authorities.pem"
    path.write_text("\n".join(ssl.DER_cert_to_PEM_cert(der) for der in trusting_context().get_ca_certs(True)))
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    async with serving(echoes, tls=server_context()) as server:
        pool = Http1Pool(DEADLINE_SECONDS)
        response = await pool.request("POST", server.url, {}, b"hi")
        assert await response.read() == b"hi"
        await pool.close()


async def test_a_server_that_speaks_no_tls_is_told_as_such():
    async def play(peer: Peer) -> None:
        await peer.reader.read(100)
        await peer.say(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

    async with serving(play) as server:
        pool = Http1Pool(DEADLINE_SECONDS, tls=trusting_context())
        with pytest.raises(ConnectFailed) as failed:
            await pool.request("POST", server.url.with_scheme("https"), {}, b"")
        assert isinstance(failed.value.cause, ssl.SSLError)
        await pool.close()


async def test_a_server_that_hangs_up_on_the_handshake_was_not_reached():
    async def play(peer: Peer) -> None:
        await peer.reader.read(100)

    async with serving(play) as server:
        pool = Http1Pool(DEADLINE_SECONDS, tls=trusting_context())
        with pytest.raises(ConnectFailed) as failed:
            await pool.request("POST", server.url.with_scheme("https"), {}, b"")
        assert isinstance(failed.value.cause, OSError)
        await pool.close()


async def test_closing_an_answer_before_its_end_closes_the_connection_at_once():
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n")
        await peer.end()

    async with serving(play, tls=server_context()) as server:
        pool = Http1Pool(DEADLINE_SECONDS, tls=trusting_context())
        response = await pool.request("POST", server.url, {}, b"")
        assert await response.read() == b"hi"
        response.close()
        with pytest.raises(ConnectionCut):
            await response.read()
        await until(lambda: server.num_open == pool.num_connections == 0, "it is closed")
        await pool.close()


async def test_an_upstream_over_https_answers_or_its_certificate_is_said_to_be_the_reason():
    timeouts = TimeoutSettings()
    async with serving(echoes, tls=server_context()) as server:
        target = TargetSettings(name="t", base_url=str(server.url.origin()))
        for tls in (trusting_context(), None):
            clients = HttpClients(timeouts, {}, tls=tls)
            upstream = OpenAIHttpUpstream(target, clients, timeouts, "hop")
            request = RawRequest("/chat/completions", b"{}", {}, stream=False)
            if tls is None:
                with pytest.raises(UpstreamUnreachable, match="issued by someone unknown") as failed:
                    await upstream.open(request)
                assert failed.value.for_good
            else:
                response = await upstream.open(request)
                assert (response.status, [piece async for piece in response.chunks()]) == (200, [b"{}"])
                await response.close()
            await clients.close()
