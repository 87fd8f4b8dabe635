"""Where the gateway's parts meet: one application, one cleanup context per resource."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any

from aiohttp import web

from gateway.loop_lag import LoopLag
from gateway.metrics import Metrics
from gateway.parts import Parts, PartUser
from gateway.probes import start_probes
from gateway.records.conversations import ConversationStore
from gateway.records.store import RecordStore
from gateway.reloading import Reloader, Source
from gateway.routing.instance_choice import InstanceChoice
from gateway.service import ChatService
from gateway.service.admission import Admission
from gateway.service.guard import TargetGuard, limits_of
from gateway.settings.schema import EngineSettings, Settings
from gateway.targets import TargetMaker
from gateway.upstreams.base import EventUpstream, PassThroughUpstream
from gateway.upstreams.litellm_sdk.library import Library
from gateway.upstreams.litellm_sdk.price_book import PriceBook
from gateway.upstreams.litellm_sdk.prices import Prices, shipped_table
from gateway.web.generation import Generation, InForce
from gateway.web.keys import ENGINE, IN_FORCE, METRICS, RECORDS, RELOADER, STARTED_AT, TURNS
from gateway.web.middlewares import add_ids, errors_as_json, request_id
from gateway.web.refusals import JsonRunner
from gateway.web.routes import dispatch
from gateway.web.turns import TurnLimit

# What clients go on with by an id: as many conversations, and as many bytes of them, as are worth keeping in memory.
MAX_CONVERSATIONS = 1000
MAX_CONVERSATION_BYTES = 64 * 1024**2

Cleanup = Callable[[web.Application], AsyncIterator[None]]


def build_app(
    settings: Settings,
    *,
    notices: Sequence[str] = (),
    engine: EventUpstream | None = None,
    source: Source | None = None,
    library: Library | None = None,
) -> web.Application:
    """The gateway. `engine` stands in for the bundled one, and is then neither started nor closed here.

    `source` is where the settings are read again while it runs; without it they stay as they are. `library` stands in
    for litellm.
    """
    app = web.Application(
        middlewares=[request_id, errors_as_json], client_max_size=int(settings.limits.max_request_mib * 1024**2)
    )
    app[METRICS] = Metrics()
    app[RECORDS] = RecordStore(settings.limits.max_records)
    app[STARTED_AT] = int(time.time())
    app[TURNS] = TurnLimit()
    if engine is not None:
        app[ENGINE] = engine
    elif (own := settings.effective_engine()) is not None:
        app.cleanup_ctx.append(_bundled_engine(settings, own))
        app.on_shutdown.append(_announce_stop)  # comes before requests are waited for
    app.cleanup_ctx.append(_in_force(settings, notices, source, library))
    app.cleanup_ctx.append(_watch_loop)
    app.on_response_prepare.append(add_ids)
    app.router.add_route("*", "/{path:.*}", dispatch)
    return app


def make_runner(app: web.Application, **options: Any) -> web.AppRunner:
    """How this application has to be run, in use and in tests.

    Without handler_cancellation a client's leaving would not end its generation. Bodies are uncompressed under the
    application's own ceiling, and refused as JSON.
    """
    return JsonRunner(
        app,
        handler_cancellation=True,
        auto_decompress=False,
        access_log=None,
        max_line_size=32 * 1024,
        max_field_size=32 * 1024,
        **options,
    )


async def _watch_loop(app: web.Application) -> AsyncIterator[None]:
    lag = LoopLag(app[METRICS].loop_lag.observe)
    lag.start()
    yield
    lag.stop()


def _bundled_engine(settings: Settings, engine_settings: EngineSettings) -> Cleanup:
    async def run(app: web.Application) -> AsyncIterator[None]:
        from gateway.upstreams.engine.upstream import EngineUpstream  # noqa: PLC0415 - not needed with upstreams alone

        engine = EngineUpstream(settings, engine_settings, make_chooser=InstanceChoice)
        app[ENGINE] = engine
        try:
            await engine.start()
            yield
        finally:
            await engine.close()

    return run


async def _announce_stop(app: web.Application) -> None:
    """Whoever ends a whole process group ends the instances too, while the gateway still waits for requests."""
    from gateway.upstreams.engine.upstream import EngineUpstream  # noqa: PLC0415

    engine = app.get(ENGINE)
    if isinstance(engine, EngineUpstream):
        engine.stop_soon()


def _in_force(settings: Settings, notices: Sequence[str], source: Source | None, library: Library | None) -> Cleanup:
    """The targets and the service, made anew whenever the settings are read again."""

    async def run(app: web.Application) -> AsyncIterator[None]:
        maker = _GenerationMaker(app, library or Library())
        in_force = app[IN_FORCE] = InForce(maker.make(1, settings, notices, None), maker.ended)
        watch = None
        if source is not None:
            reloader = app[RELOADER] = Reloader(source, in_force, maker.make, app[METRICS])
            watch = asyncio.create_task(reloader.run())
        yield
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        await maker.close(in_force.current)

    return run


class _GenerationMaker:
    """What all generations share is made once, here."""

    def __init__(self, app: web.Application, library: Library) -> None:
        self._app = app
        self._parts = Parts()
        self._prices = Prices(shipped_table())
        self._targets = TargetMaker(uuid.uuid4().hex[:16], self._prices, library, app[METRICS].leg_failed)
        self._conversations = ConversationStore(MAX_CONVERSATIONS, MAX_CONVERSATION_BYTES)
        self._admission = Admission(count_refusal=app[METRICS].count_key_refusal)
        self._closing: set[asyncio.Task[None]] = set()

    def make(self, number: int, settings: Settings, notices: Sequence[str], old: Generation | None) -> Generation:
        """Never changes the old one: it stays in force if anything is raised here."""
        parts = self._parts.user()
        try:
            return self._make(number, settings, notices, old, parts)
        except BaseException:
            self._close_soon(parts.close())  # a pair would be watched for ever
            raise

    def _make(
        self, number: int, settings: Settings, notices: Sequence[str], old: Generation | None, parts: PartUser
    ) -> Generation:
        targets, pairs = self._targets.make(settings, parts), self._targets.make_pairs(settings, parts)
        everywhere: dict[str, PassThroughUpstream] = {**targets, **pairs}
        service = ChatService(
            settings,
            engine=self._app.get(ENGINE),
            targets=everywhere,
            metrics=self._app[METRICS],
            records=self._app[RECORDS],
            conversations=self._conversations,
            admission=self._admission,
            guards=_kept_guards(old, settings, everywhere),
        )
        self._admission.prices = PriceBook.of(settings, self._prices)
        start_probes(settings, parts, service.guards)
        return Generation(number, settings, tuple(notices), targets, pairs, service, parts.close)

    def ended(self, generation: Generation) -> None:
        """Its last request is over."""
        self._close_soon(generation.close())

    def _close_soon(self, closing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self, current: Generation) -> None:
        await asyncio.gather(*self._closing, current.close())


def _kept_guards(
    old: Generation | None, settings: Settings, upstreams: Mapping[str, PassThroughUpstream]
) -> dict[str, TargetGuard]:
    """Of targets that are the same as before, with what is known of their health."""
    if old is None:
        return {}
    before: Mapping[str, PassThroughUpstream] = {**old.targets, **old.pairs}
    return {
        name: guard
        for name, guard in old.service.guards.items()
        if before.get(name) is upstreams.get(name) and limits_of(old.settings, name) == limits_of(settings, name)
    }
