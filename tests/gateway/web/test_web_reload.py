"""Settings that are read again under a running gateway: new requests by the new ones, running streams by the old."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

from web_support import (
    DONE,
    ROLE,
    Wait,
    chunk,
    fake_upstream,
    http_answer,
    running,
    sse_answer,
)
from yarl import URL

from gateway.reloading import Source
from gateway.settings.errors import SettingsError
from gateway.settings.importers import LoadedSettings, Shape
from gateway.settings.schema import (
    KeySettings,
    LimitSettings,
    RetrySettings,
    ServerSettings,
    Settings,
    TargetSettings,
    TimeoutSettings,
)
from gateway.web.keys import IN_FORCE, RELOADER
from support.waiting import until

HEADERS = {"Authorization": "Bearer sk-a"}


class Written:
    """A settings file without a file: what it holds now, or the error of reading it."""

    def __init__(self, settings):
        self.now = settings
        self.learnt = []

    def load(self):
        if isinstance(self.now, Exception):
            raise self.now
        return LoadedSettings(self.now, (), None, Shape.NATIVE)

    def source(self):
        return Source(self.load(), self.load, self.learnt.append)


@asynccontextmanager
async def reloadable(settings):
    written = Written(settings)
    async with running(settings, source=written.source()) as gateway:
        reloader = gateway.app[RELOADER]

        async def reload(new):
            before = reloader.state
            written.now = new
            reloader.ask()
            await until(lambda: reloader.state is not before, "the settings were read again")

        yield gateway, reload, written


def target(upstream, name="t", model="m", **more):
    return TargetSettings(name=name, base_url=upstream.url, models=(model,), **more)


def answering(text):
    return sse_answer(ROLE, chunk(text), chunk(finish="stop"), DONE)


async def test_new_requests_go_by_the_new_settings_and_running_streams_by_the_old():
    go = asyncio.Event()
    slow = sse_answer(ROLE, chunk("old"), Wait(go), chunk("!"), chunk(finish="stop"), DONE)
    async with (
        fake_upstream(slow) as one,
        fake_upstream(answering("new")) as two,
        reloadable(Settings(targets=(target(one),))) as (gateway, reload, written),
    ):
        first = gateway.app[IN_FORCE].current
        task = asyncio.create_task(gateway.chat(model="m", stream=True))
        await until(lambda: one.seen)
        settings = Settings(targets=(target(two),), keys=(KeySettings(key="sk-a", name="a"),))
        await reload(settings)

        keyless = await gateway.chat(model="m", stream=True)
        after = await gateway.chat(model="m", stream=True, headers=HEADERS)
        assert first.num_requests == 1
        go.set()
        old = await task
        await until(lambda: first.num_requests == 0)
        ready = (await gateway.get("/ready")).json()["settings"]

    assert (old.text(), old.done) == ("old!", True)
    assert keyless.status == 401
    assert after.text() == "new"
    assert written.learnt == [settings]
    assert (ready["generation"], ready["failed_at"], ready["problems"]) == (2, None, [])


async def test_a_target_that_is_gone_is_gone_and_its_connections_with_its_last_stream():
    go = asyncio.Event()
    slow = sse_answer(ROLE, chunk("a"), Wait(go), chunk(finish="stop"), DONE)
    async with fake_upstream(slow) as one, fake_upstream(http_answer(b"{}")) as two:
        settings = Settings(targets=(target(one), target(two, "u", "n")))
        async with reloadable(settings) as (gateway, reload, _):
            first = gateway.app[IN_FORCE].current
            clients = first.targets["t"]._clients
            task = asyncio.create_task(gateway.chat(model="m", stream=True))
            await until(lambda: one.seen)
            session = clients.session(URL(one.url))
            await reload(Settings(targets=(target(two, "u", "n"),), timeouts=TimeoutSettings(connect_seconds=3)))
            unknown = await gateway.chat(model="m")
            assert not session.closed
            go.set()
            assert (await task).done
            await until(lambda: session.closed, "the connections of the old settings were closed")
    assert unknown.status == 404


async def test_what_did_not_change_keeps_its_connections_health_and_counts():
    async with fake_upstream(http_answer(b"no", status="500 No")) as bad, fake_upstream(answering("a")) as good:
        retry = RetrySettings(max_attempts=1)
        settings = Settings(targets=(target(bad, "bad", "b", breaker_failures=1), target(good)), retry=retry)
        async with reloadable(settings) as (gateway, reload, _):
            await gateway.chat(model="b")
            before = gateway.app[IN_FORCE].current
            await reload(settings.model_copy(update={"server": ServerSettings(model="m")}))
            after = gateway.app[IN_FORCE].current
            refused = await gateway.chat(model="b")
            by_default = await gateway.chat(stream=True)

    assert after is not before
    assert after.targets["bad"] is before.targets["bad"]
    assert (refused.status, refused.error["code"]) == (503, "target_unavailable")
    assert by_default.text() == "a"


async def test_limits_hold_across_a_reload():
    go = asyncio.Event()
    async with fake_upstream(sse_answer(Wait(go), chunk("a"), chunk(finish="stop"), DONE)) as upstream:
        key = KeySettings(key="sk-a", name="a", max_concurrent=1)
        settings = Settings(targets=(target(upstream),), keys=(key,))
        async with reloadable(settings) as (gateway, reload, _):
            task = asyncio.create_task(gateway.chat(model="m", stream=True, headers=HEADERS))
            await until(lambda: upstream.seen)
            await reload(settings.model_copy(update={"limits": LimitSettings(max_concurrent_requests=1)}))
            full = await gateway.chat(model="m", stream=True, headers=HEADERS)
            await reload(settings)
            at_once = await gateway.chat(model="m", stream=True, headers=HEADERS)
            go.set()
            await task
            free = await gateway.chat(model="m", stream=True, headers=HEADERS)
    assert (full.status, full.error["code"]) == (429, "queue_full")
    assert (at_once.status, at_once.error["code"]) == (429, "rate_limit_exceeded")
    assert free.status == 200


async def test_settings_that_can_not_be_used_leave_the_old_ones_in_force_and_say_why(caplog):
    async with (
        fake_upstream(answering("a")) as upstream,
        reloadable(Settings(targets=(target(upstream),))) as (gateway, reload, _),
    ):
        await reload(SettingsError(["server.port (kvgate.toml, line 2): must be a whole number"]))
        answer = await gateway.chat(model="m", stream=True)
        ready = await gateway.get("/ready")
        failures = await gateway.metric("kvgate_settings_reload_failures_total")
        loaded_at = await gateway.metric("kvgate_settings_loaded_timestamp_seconds")
        await reload(Settings(targets=(target(upstream),)))
        mended = (await gateway.get("/ready")).json()["settings"]

    state = ready.json()["settings"]
    assert (ready.status, answer.text(), failures) == (200, "a", 1)
    assert (state["generation"], state["loaded_at"]) == (1, loaded_at)
    assert state["failed_at"] >= loaded_at
    assert state["problems"] == ["server.port (kvgate.toml, line 2): must be a whole number"]
    assert "line 2" in caplog.text
    assert "stay in force" in caplog.text
    assert (mended["generation"], mended["failed_at"], mended["problems"]) == (2, None, [])


async def test_an_error_that_nobody_foresaw_leaves_the_old_ones_in_force():
    async with (
        fake_upstream(answering("a")) as upstream,
        reloadable(Settings(targets=(target(upstream),))) as (gateway, reload, _),
    ):
        await reload(RuntimeError("boom"))
        answer = await gateway.chat(model="m", stream=True)
        state = (await gateway.get("/ready")).json()["settings"]
    assert answer.text() == "a"
    assert "boom" not in str(state)
    assert state["problems"]


async def test_what_needs_a_restart_is_named_and_left_as_it_is(caplog):
    async with fake_upstream(answering("a")) as upstream:
        settings = Settings(targets=(target(upstream),))
        async with reloadable(settings) as (gateway, reload, _):
            changed = settings.model_copy(update={"server": ServerSettings(port=9999, model="m")})
            await reload(changed)
            answer = await gateway.chat(stream=True)
            ready = (await gateway.get("/ready")).json()
            in_force = gateway.app[IN_FORCE].current.settings
    assert answer.text() == "a"
    assert ready["settings"]["needs_restart"] == ["server.port"]
    assert any("after a restart: server.port" in notice for notice in ready["notices"])
    assert "these changes take effect after a restart: server.port" in caplog.text
    assert in_force.server == ServerSettings(model="m")


async def test_problems_do_not_tell_where_the_file_is(tmp_path):
    path = tmp_path / "kvgate.toml"
    settings = Settings(targets=(TargetSettings(name="t", base_url="http://127.0.0.1:9"),))
    written = Written(settings)
    loaded = LoadedSettings(settings, (), path, Shape.NATIVE, {path: None, tmp_path / "a.key": None})
    missing = Path("/etc/keys/b.key")
    async with running(settings, source=Source(loaded, written.load)) as gateway:
        problems = [f"{path}: the settings file does not exist", f"{tmp_path}/a.key: is empty", f"{missing}: is empty"]
        written.now = SettingsError(problems, {missing: None})
        gateway.app[RELOADER].ask()
        await until(lambda: gateway.app[RELOADER].state.problems)
        problems = (await gateway.get("/ready")).json()["settings"]["problems"]
    assert problems == ["kvgate.toml: the settings file does not exist", "a.key: is empty", "b.key: is empty"]


async def test_many_reloads_leave_nothing_behind():
    async with fake_upstream(answering("a")) as upstream:
        settings = Settings(targets=(target(upstream),))
        async with reloadable(settings) as (gateway, reload, _):
            for i in range(20):
                await reload(settings.model_copy(update={"timeouts": TimeoutSettings(idle_seconds=10 + i)}))
                assert (await gateway.chat(model="m", stream=True)).text() == "a"
            maker = gateway.app[IN_FORCE]._ended.__self__
            await until(lambda: not maker._closing)
            assert len(maker._parts._parts) == 2


async def test_without_a_source_there_is_nothing_to_read_again():
    async with running(Settings(targets=(TargetSettings(name="t", base_url="http://127.0.0.1:9"),))) as gateway:
        assert (await gateway.get("/ready")).json()["settings"] is None
        assert RELOADER not in gateway.app
