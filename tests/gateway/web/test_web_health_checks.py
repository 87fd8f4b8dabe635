"""Health checks of targets through the whole gateway: who is left alone, who comes back, and that none is left over."""

from __future__ import annotations

import asyncio
import logging

import pytest
from test_web_reload import reloadable
from web_answers import ONCE, PLAIN
from web_support import (
    Hold,
    Reset,
    Wait,
    fake_upstream,
    http_answer,
    running,
    upstream_settings,
)

from gateway.settings.schema import KeySettings, RetrySettings, RouteSettings, Settings, TargetSettings, TimeoutSettings
from gateway.upstreams.http.clients import HttpClients
from gateway.upstreams.http.health_probe import HealthProbe
from support.waiting import until, until_told

SOON = 0.005


class Server:
    """Answers chats, and health checks as the test says."""

    def __init__(self) -> None:
        self.health = http_answer(b"ok")
        self.chat = PLAIN

    def __call__(self, seen):
        return self.health if seen.method == "GET" else self.chat


def checked(upstream, **more) -> TargetSettings:
    options = {"models": ("m",), "health_path": "/health", "health_seconds": SOON, **more}
    return TargetSettings(name="a", base_url=upstream.url + "/v1", **options)


def only(upstream, **more) -> Settings:
    return Settings(targets=(checked(upstream, **more),), retry=ONCE)


async def until_healthy(gateway, wanted, target="a"):
    return await until_told(lambda: gateway.health(target), lambda health: health["healthy"] is wanted)


def checks(upstream):
    return [seen for seen in upstream.seen if seen.method == "GET"]


def probe_tasks():
    return [task for task in asyncio.all_tasks() if task.get_name().startswith("health checks of")]


async def test_a_target_whose_checks_fail_is_left_alone_until_one_succeeds(caplog):
    caplog.set_level(logging.INFO)
    server = Server()
    async with fake_upstream(server) as upstream, running(only(upstream)) as gateway:
        await until_healthy(gateway, True)
        server.health = http_answer(b"no", status="503 No")
        ill = await until_healthy(gateway, False)
        refused = await gateway.chat(model="m")
        metric_ill = (await gateway.get("/metrics")).body.decode()
        num_chats = len(upstream.seen) - len(checks(upstream))
        server.health = http_answer(b"", status="204 No Content")
        well = await until_healthy(gateway, True)
        answered = await gateway.chat(model="m")
        metric_well = (await gateway.get("/metrics")).body.decode()

    assert (ill["last_check"], well["last_check"]) == ("GET /health answered 503", None)
    assert (refused.status, refused.error["code"], num_chats) == (503, "target_unavailable", 0)
    assert "GET /health answered 503" in refused.error["message"]
    assert int(refused.headers["Retry-After"]) >= 1
    assert answered.status == 200
    assert 'kvgate_upstream_healthy{backend="a"} 0.0' in metric_ill
    assert 'kvgate_upstream_healthy{backend="a"} 1.0' in metric_well
    said = [record.getMessage() for record in caplog.records if record.name == "gateway.service.guard"]
    assert said == ["upstream a is ill, nothing is sent there: GET /health answered 503", "upstream a is well again"]


async def test_an_ill_target_leads_straight_to_the_fallback():
    server = Server()
    server.health = http_answer(b"no", status="500 No")
    async with fake_upstream(server) as upstream, fake_upstream(PLAIN) as other:
        settings = Settings(
            targets=(checked(upstream), TargetSettings(name="b", base_url=other.url)),
            routes=(RouteSettings(model="m", target="a", fallbacks=("b",)),),
        )
        async with running(settings) as gateway:
            await until_healthy(gateway, False)
            answer = await gateway.chat(model="m")
        assert not [seen for seen in upstream.seen if seen.method == "POST"]
    assert (answer.status, answer.headers["X-Cache-Backend"]) == (200, "b")


async def test_a_good_check_closes_an_open_breaker_early():
    server = Server()
    server.chat, go = [Reset()], asyncio.Event()
    async with fake_upstream(server) as upstream:
        settings = only(upstream, breaker_failures=1, breaker_seconds=3600.0)
        server.health = [Wait(go), *http_answer(b"ok")]
        async with running(settings) as gateway:
            assert (await gateway.chat(model="m")).status == 502
            assert (await gateway.chat(model="m")).status == 503
            server.chat = PLAIN
            go.set()
            await until_healthy(gateway, True)
            answer = await gateway.chat(model="m")
    assert answer.status == 200


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ([Reset()], "had no answer"),
        ([b"GARBAGE\r\n\r\n", Reset()], "had no answer"),
        (http_answer(b"", status="302 Found", extra="Location: /\r\n"), "answered 302"),
        (http_answer(b"", status="404 Not Found"), "answered 404"),
    ],
)
async def test_whatever_is_no_2xx_is_a_failure_that_says_what_came(script, why):
    server = Server()
    server.health = script
    async with fake_upstream(server) as upstream, running(only(upstream)) as gateway:
        health = await until_healthy(gateway, False)
    assert why in health["last_check"]


async def test_a_server_that_is_away_and_comes_back_is_seen():
    async with fake_upstream(PLAIN) as upstream:
        url = upstream.url
    settings = Settings(
        targets=(TargetSettings(name="a", base_url=url, models=("m",), health_path="/health", health_seconds=SOON),)
    )
    async with running(settings) as gateway:
        health = await until_healthy(gateway, False)
    assert "had no answer" in health["last_check"]
    assert url not in health["last_check"]


async def test_a_check_without_an_answer_has_an_end_and_is_hung_up():
    told = asyncio.Queue()
    async with fake_upstream([Hold()]) as upstream:
        clients = HttpClients(TimeoutSettings(), {})
        probe = HealthProbe(checked(upstream), clients, told.put_nowait, limit_seconds=0.02)
        probe.start()
        try:
            async with asyncio.timeout(10):
                why = await told.get()
            await until(lambda: upstream.num_gone)
        finally:
            await probe.close()
            await clients.close()
    assert why == "GET /health had no answer within 0.02 s"
    assert not probe_tasks()


async def test_an_endless_answer_is_not_read():
    server = Server()
    server.health = [b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n", b"x" * 1000, Hold()]
    async with fake_upstream(server) as upstream, running(only(upstream)) as gateway:
        await until_healthy(gateway, True)
        await until(lambda: upstream.num_gone)


@pytest.mark.parametrize(
    ("dialects", "name", "value"),
    [(("openai_chat",), "Authorization", "Bearer sk-up"), (("anthropic_messages",), "x-api-key", "sk-up")],
)
async def test_au_06_the_target_s_key_goes_along_and_a_client_s_never(dialects, name, value):
    server = Server()
    async with fake_upstream(server) as upstream:
        settings = only(upstream, api_key="sk-up", dialects=dialects).model_copy(
            update={"keys": (KeySettings(key="sk-client", name="k"),)}
        )
        async with running(settings) as gateway:
            await gateway.chat(model="m", headers={"Authorization": "Bearer sk-client"})
            await until(lambda: len(checks(upstream)) >= 2)
    for seen in checks(upstream):
        assert seen.path == "/health"  # on the host, not below the base URL
        assert seen.header(name) == value
        assert "sk-client" not in str(seen.headers)


async def test_a_client_s_own_key_is_not_used_for_checks_where_it_is_forwarded():
    server = Server()
    async with fake_upstream(server) as upstream, running(only(upstream, forward_client_key=True)) as gateway:
        await gateway.chat(model="m", headers={"Authorization": "Bearer sk-client"})
        await until(lambda: len(checks(upstream)) >= 2)
    assert any("sk-client" in str(seen.headers) for seen in upstream.seen if seen.method == "POST")
    assert not any("sk-client" in str(seen.headers) for seen in checks(upstream))


async def test_without_a_path_nobody_is_asked_and_nothing_is_claimed():
    async with fake_upstream(PLAIN) as upstream, running(upstream_settings(upstream.url)) as gateway:
        health = await gateway.health("upstream")
        text = (await gateway.get("/metrics")).body.decode()
        assert not probe_tasks()
    assert (health["healthy"], health["last_check"]) == (None, None)
    assert "kvgate_upstream_healthy{" not in text
    assert not upstream.seen


async def test_the_unified_upstream_is_checked_too():
    server = Server()
    server.health = http_answer(b"no", status="503 No")
    async with fake_upstream(server) as upstream:
        settings = upstream_settings(upstream.url, server={"api_health_path": "/v1/models"}, retry=ONCE)
        async with running(settings):
            await until(lambda: checks(upstream))
            assert checks(upstream)[0].path == "/v1/models"


# -------------------------------------------------------------------------------------------------- nothing left over


async def test_checks_end_with_the_gateway():
    server = Server()
    async with fake_upstream(server) as upstream:
        async with running(only(upstream)) as gateway:
            await until_healthy(gateway, True)
            assert len(probe_tasks()) == 1
        assert not probe_tasks()


async def test_checks_end_with_the_settings_that_wanted_them_and_go_on_where_nothing_changed():
    server = Server()
    async with fake_upstream(server) as upstream:
        async with reloadable(only(upstream)) as (gateway, reload, _):
            await until_healthy(gateway, True)
            (first,) = probe_tasks()
            await reload(only(upstream).model_copy(update={"retry": RetrySettings(max_attempts=2)}))
            assert probe_tasks() == [first]
            assert (await gateway.health("a"))["healthy"] is True

            await reload(only(upstream, health_path="/other"))
            await until(lambda: len(probe_tasks()) == 1 and first not in probe_tasks())
            await until(lambda: checks(upstream)[-1].path == "/other")

            await reload(only(upstream, health_path=None))
            await until(lambda: not probe_tasks())
            num_checks = len(checks(upstream))
            assert (await gateway.health("a"))["healthy"] is None
            assert len(checks(upstream)) == num_checks
        assert not probe_tasks()


async def test_a_target_that_comes_back_while_an_old_stream_still_runs_is_told_of_its_own_checks():
    """Its guard is a new one: checks that report to the old one would leave it without any."""
    server, go = Server(), asyncio.Event()
    async with fake_upstream(server) as upstream:
        async with reloadable(only(upstream)) as (gateway, reload, _):
            await until_healthy(gateway, True)
            server.chat = [Wait(go), *PLAIN]
            running_one = asyncio.create_task(gateway.chat(model="m"))
            await until(lambda: any(seen.method == "POST" for seen in upstream.seen))
            await reload(Settings(targets=(TargetSettings(name="b", base_url=upstream.url),), retry=ONCE))
            await reload(only(upstream))
            await until_healthy(gateway, True)
            go.set()
            assert (await running_one).status == 200
            await until(lambda: len(probe_tasks()) == 1)
            server.health = http_answer(b"no", status="503 No")
            await until_healthy(gateway, False)
        assert not probe_tasks()
