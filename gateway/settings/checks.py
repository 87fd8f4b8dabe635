"""What settings mean together: refusals and advice that no single option shows. Pure: settings and their origins in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from urllib.parse import urlsplit

from gateway.core.types import CacheMode
from gateway.settings.base_url import is_loopback
from gateway.settings.device_checks import device_advice, device_refusals
from gateway.settings.entries import Draft, Path
from gateway.settings.key_checks import key_advice, key_refusals
from gateway.settings.pair_checks import pair_advice, pair_refusals
from gateway.settings.schema import Settings
from gateway.settings.target_checks import target_advice, target_refusals

ENGINE_TABLES = ("kv_cache", "scheduler", "transfer")
HIGHEST_UTILIZATION = 0.92


def refusals(settings: Settings, draft: Draft) -> Iterator[str]:
    """Reasons not to start."""
    for check in (
        _open_to_others,
        _own_upstream,
        _endpoints,
        _names,
        _keys,
        _routes,
        _modes,
        _variant_names,
        device_refusals,
        target_refusals,
        pair_refusals,
        key_refusals,
    ):
        yield from check(settings, draft)


def advice(settings: Settings, draft: Draft) -> Iterator[str]:
    """What has no effect, or not the one that was hoped for."""
    for check in _advice_checks(settings):
        yield from check(settings, draft)


def _advice_checks(settings: Settings) -> tuple[Callable[[Settings, Draft], Iterator[str]], ...]:
    by_engine = (device_advice, _engine_limits, _variants) if settings.effective_engine() else (_no_engine,)
    return (
        *by_engine,
        _chunk_in_split,
        _split_upstream,
        _unused_keys,
        target_advice,
        pair_advice,
        key_advice,
        _unreached_fallbacks,
        _nothing_served,
    )


def _open_to_others(settings: Settings, draft: Draft) -> Iterator[str]:
    if not settings.keys and not is_loopback(settings.server.host):
        yield (
            f"{draft.origin_of(('server', 'host'))}: {settings.server.host} can be reached by others, and no client "
            'key is set. Add [[keys]] with name and key, or use host = "127.0.0.1"'
        )


def _own_upstream(settings: Settings, draft: Draft) -> Iterator[str]:
    """A request would go round for ever."""
    server = settings.server
    bases: list[tuple[Path, str | None]] = [(("server", "api_base"), server.api_base)]
    bases += [(("targets", i, "base_url"), target.base_url) for i, target in enumerate(settings.targets)]
    for path, base in bases:
        parts = urlsplit(base or "")
        if parts.hostname and is_loopback(parts.hostname) and parts.port == server.port and server.port:
            yield f"{draft.origin_of(path)}: is this gateway itself; an upstream must be another server"


def _endpoints(settings: Settings, draft: Draft) -> Iterator[str]:
    layout, base = settings.cache_layout, settings.server.api_base
    prefill, decode = layout.prefill_endpoint, layout.decode_endpoint
    if prefill is None and decode is None:
        return
    place = draft.origin_of(("cache_layout", "prefill_endpoint" if prefill else "decode_endpoint"))
    if prefill is None or decode is None:
        yield f"{place}: the prefill and the decode endpoint are needed together"
    elif prefill != decode:
        yield (
            f"{place}: these two endpoints say nothing of the protocol between a prefill and a decode server. Give the "
            "servers in [[pairs]] with their engine; here the endpoints can only both be the base URL of a unified "
            "upstream that splits by itself. Without any, the bundled engine's own pair splits"
        )
    elif prefill != base:
        yield (
            f"{place}: the prefill and the decode endpoint are one instance, and not the unified upstream: split can't "
            "work there. merged is the mode for a single instance"
        )


def _names(settings: Settings, draft: Draft) -> Iterator[str]:
    places = target_places(settings)
    for i, (name, path) in enumerate(places):
        if name.lower() in {other.lower() for other, _ in places[:i]}:
            yield f"{draft.origin_of(path)}: the name {name!r} is given to two targets; each needs its own"


def target_places(settings: Settings) -> list[tuple[str, Path]]:
    """Names of all targets that exist, with the option that names each."""
    engine = settings.effective_engine()
    places: list[tuple[str, Path]] = [(engine.name, ("engine", "name"))] if engine else []
    if settings.server.api_base:
        places.append((settings.server.name, ("server", "name")))
    places += [(target.name, ("targets", i, "name")) for i, target in enumerate(settings.targets)]
    return places + [(pair.name, ("pairs", i, "name")) for i, pair in enumerate(settings.pairs)]


def _keys(settings: Settings, draft: Draft) -> Iterator[str]:
    for field, values in {
        "key": [key.key.get_secret_value() for key in settings.keys],
        "name": [key.name for key in settings.keys],
    }.items():
        for i, value in enumerate(values):
            if value in values[:i]:
                yield f"{draft.origin_of(('keys', i, field))}: is the same as another entry's; each must differ"


def _routes(settings: Settings, draft: Draft) -> Iterator[str]:
    names = [name for name, _ in target_places(settings)]
    engine = settings.effective_engine()
    for i, route in enumerate(settings.routes):
        if route.target not in names:
            known = ", ".join(names) or "none"
            yield f"{draft.origin_of(('routes', i, 'target'))}: no target is named {route.target!r}; targets: {known}"
        elif engine and route.target == engine.name and route.upstream_model not in {None, engine.public_name()}:
            place = draft.origin_of(("routes", i, "upstream_model"))
            yield f"{place}: the bundled engine serves {engine.public_name()!r} and no other model"
        yield from _fallbacks(settings, draft, i, names)


def _fallbacks(settings: Settings, draft: Draft, i: int, names: Sequence[str]) -> Iterator[str]:
    route = settings.routes[i]
    place, known = draft.origin_of(("routes", i, "fallbacks")), ", ".join(names) or "none"
    for j, name in enumerate(route.fallbacks):
        if name not in names:
            yield f"{place}: no target is named {name!r}; targets: {known}"
        elif name == route.target or name in route.fallbacks[:j]:
            yield f"{place}: {name!r} is asked already; each fallback must be another target"


def _modes(settings: Settings, draft: Draft) -> Iterator[str]:
    engine, mode = settings.effective_engine(), settings.cache_layout.mode
    if engine is None:
        return
    if not engine.modes:
        yield f"{draft.origin_of(('engine', 'modes'))}: is empty; give merged, split or both"
    elif mode not in engine.modes and len(target_places(settings)) == 1:
        enabled = ", ".join(engine.modes)
        yield (
            f"{draft.origin_of(('cache_layout', 'mode'))}: the default mode is {mode}, but engine.modes has only "
            f"{enabled}: requests that choose no mode could not be served. Set it to {enabled}"
        )


def _variant_names(settings: Settings, draft: Draft) -> Iterator[str]:
    names = settings.engine.kv_cache_variants if settings.engine else ()
    for name in dict.fromkeys(name for i, name in enumerate(names) if name in names[:i]):
        yield f"{draft.origin_of(('engine', 'kv_cache_variants'))}: {name} is named twice"


def _engine_limits(settings: Settings, draft: Draft) -> Iterator[str]:
    cache, scheduler = settings.kv_cache, settings.scheduler
    if cache.gpu_memory_utilization > HIGHEST_UTILIZATION:
        yield (
            f"{draft.origin_of(('kv_cache', 'gpu_memory_utilization'))}: {cache.gpu_memory_utilization} is above "
            f"{HIGHEST_UTILIZATION} and may run out of device memory; 0.85 to 0.92 is advised"
        )
    if cache.prefill_chunk_tokens > scheduler.max_batched_tokens:
        yield (
            f"{draft.origin_of(('kv_cache', 'prefill_chunk_tokens'))}: {cache.prefill_chunk_tokens} is more than a "
            f"whole step computes; scheduler.max_batched_tokens, {scheduler.max_batched_tokens}, is the limit"
        )

    if cache.decode_kv_limit_gb is not None and cache.num_kv_blocks is not None:
        place = draft.origin_of(("kv_cache", "decode_kv_limit_gb"))
        yield f"{place}: no effect, since num_kv_blocks sets the size of every pool"


def _variants(settings: Settings, draft: Draft) -> Iterator[str]:
    engine, cache = settings.effective_engine(), settings.kv_cache
    if engine is None or not engine.kv_cache_variants:
        return
    place = draft.origin_of(("engine", "kv_cache_variants"))
    if cache.kv_cache_dtype in engine.kv_cache_variants:
        yield f"{place}: {cache.kv_cache_dtype} is never started, since the main engine has it (kv_cache_dtype)"
    if engine.device != "cpu" and cache.kv_cache_gib is None and cache.num_kv_blocks is None:
        yield (
            f"{place}: on a CUDA device the main engine's KV pool leaves no memory for a variant, unless kv_cache_gib "
            "or num_kv_blocks limits it"
        )


def _no_engine(settings: Settings, draft: Draft) -> Iterator[str]:
    given = [
        origin.name
        for path, origin in draft.origins.items()
        if draft.values[path] != "auto"  # leaves it to whatever serves
        if path[0] in ENGINE_TABLES or (path[0] == "cache_layout" and str(path[-1]).endswith("_gpus"))
    ]
    if given:
        start = "set engine.enabled = true" if settings.engine else "add a table [engine]"
        yield (
            f"{', '.join(given)}: these act on the bundled engine only, and it does not run; to run it beside the "
            f"upstream, {start}"
        )


def _chunk_in_split(settings: Settings, draft: Draft) -> Iterator[str]:
    layout = settings.cache_layout
    if layout.chunk_size is not None and layout.mode is CacheMode.SPLIT:
        place = draft.origin_of(("cache_layout", "chunk_size"))
        yield f"{place}: no effect in split, where the prefill side chunks by itself; it acts on merged requests"


def _split_upstream(settings: Settings, draft: Draft) -> Iterator[str]:
    if settings.cache_layout.prefill_endpoint is not None:
        yield (
            f"{draft.origin_of(('cache_layout', 'prefill_endpoint'))}: both endpoints are the unified upstream: it "
            "splits by itself and is told the mode by X-Cache-Mode"
        )


def _unused_keys(settings: Settings, draft: Draft) -> Iterator[str]:
    server = settings.server
    if server.api_key and not server.api_base:
        yield f"{draft.origin_of(('server', 'api_key'))}: not used, since no upstream base URL is set"
    if server.api_key and server.forward_client_key:
        yield f"{draft.origin_of(('server', 'forward_client_key'))}: no effect, since api_key is set and is sent"


def _unreached_fallbacks(settings: Settings, draft: Draft) -> Iterator[str]:
    most = settings.retry.max_attempts
    for i, route in enumerate(settings.routes):
        if len(route.fallbacks) >= most:
            unreached = ", ".join(route.fallbacks[most - 1 :])
            place = draft.origin_of(("routes", i, "fallbacks"))
            yield f"{place}: {unreached} can't be reached, since retry.max_attempts is {most}, all targets together"


def _nothing_served(settings: Settings, draft: Draft) -> Iterator[str]:
    if not target_places(settings):
        place = draft.origin_of(("engine", "enabled"))
        yield f"{place}: nothing is served: the engine is off, and there is no api_base, [[targets]] or [[pairs]]"
