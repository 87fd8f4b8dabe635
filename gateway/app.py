"""Where the gateway's parts meet: one application, one cleanup context per resource."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from aiohttp import web

from gateway.metrics import Metrics
from gateway.records.store import RecordStore
from gateway.service import ChatService
from gateway.settings.schema import EngineSettings, Settings, TargetSettings
from gateway.upstreams.base import EventUpstream
from gateway.upstreams.openai_http import HttpClients, OpenAIHttpUpstream
from gateway.web.keys import ENGINE, METRICS, NOTICES, RECORDS, SERVICE, SETTINGS, STARTED_AT, TARGETS
from gateway.web.middlewares import add_ids, errors_as_json, request_id
from gateway.web.routes import dispatch

Cleanup = Callable[[web.Application], AsyncIterator[None]]


def build_app(
    settings: Settings, *, notices: Sequence[str] = (), engine: EventUpstream | None = None
) -> web.Application:
    """The gateway. `engine` stands in for the bundled one, and is then neither started nor closed here."""
    app = web.Application(
        middlewares=[request_id, errors_as_json], client_max_size=int(settings.limits.max_request_mib * 1024**2)
    )
    app[SETTINGS] = settings
    app[NOTICES] = tuple(notices)
    app[METRICS] = Metrics()
    app[RECORDS] = RecordStore(settings.limits.max_records)
    app[STARTED_AT] = int(time.time())
    if engine is not None:
        app[ENGINE] = engine
    elif (own := settings.effective_engine()) is not None:
        app.cleanup_ctx.append(_bundled_engine(own))
        app.on_shutdown.append(_announce_stop)  # comes before requests are waited for
    app.cleanup_ctx.append(_upstreams)
    app.cleanup_ctx.append(_service)
    app.on_response_prepare.append(add_ids)
    app.router.add_route("*", "/{path:.*}", dispatch)
    return app


def make_runner(app: web.Application, **options: Any) -> web.AppRunner:
    """How this application has to be run, in use and in tests.

    Without handler_cancellation a client's leaving would not end its generation. Bodies are uncompressed under the
    application's own ceiling, and refused as JSON.
    """
    return web.AppRunner(
        app,
        handler_cancellation=True,
        auto_decompress=False,
        access_log=None,
        max_line_size=32 * 1024,
        max_field_size=32 * 1024,
        **options,
    )


def _bundled_engine(engine_settings: EngineSettings) -> Cleanup:
    async def run(app: web.Application) -> AsyncIterator[None]:
        from gateway.upstreams.engine import EngineUpstream  # noqa: PLC0415 - not needed with upstreams alone

        engine = EngineUpstream(app[SETTINGS], engine_settings)
        app[ENGINE] = engine
        try:
            await engine.start()
            yield
        finally:
            await engine.close()

    return run


async def _announce_stop(app: web.Application) -> None:
    """Whoever ends a whole process group ends the instances too, while the gateway still waits for requests."""
    from gateway.upstreams.engine import EngineUpstream  # noqa: PLC0415

    engine = app.get(ENGINE)
    if isinstance(engine, EngineUpstream):
        engine.stop_soon()


async def _upstreams(app: web.Application) -> AsyncIterator[None]:
    settings = app[SETTINGS]
    clients = HttpClients(settings.timeouts)
    hop_id = uuid.uuid4().hex[:16]
    targets = [OpenAIHttpUpstream(target, clients, settings.timeouts, hop_id) for target in _all_targets(settings)]
    app[TARGETS] = {target.name: target for target in targets}
    yield
    await clients.close()


def _all_targets(settings: Settings) -> list[TargetSettings]:
    """The named targets, and the unified upstream as one more."""
    server = settings.server
    if server.api_base is None:
        return list(settings.targets)
    unified = TargetSettings(
        name=server.name,
        base_url=server.api_base,
        api_key=server.api_key,
        forward_client_key=server.forward_client_key,
    )
    return [*settings.targets, unified]


async def _service(app: web.Application) -> AsyncIterator[None]:
    targets = app[TARGETS]
    app[SERVICE] = ChatService(
        app[SETTINGS], engine=app.get(ENGINE), targets=targets, metrics=app[METRICS], records=app[RECORDS]
    )
    yield
