"""The cache strategy of one request, from every channel it can come by. Pure: values in, a `CacheStrategy` out.

Precedence: header, body, query, path, model suffix, key, the settings' default. A bad value is refused in whichever
channel it stands, also where a higher one would win: whoever wrote it believes that it acts.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from gateway.core.errors import InvalidRequest
from gateway.core.spelling import round_chunk_size
from gateway.core.types import CacheMode, CacheStrategy, StrategySource
from gateway.settings.base_url import normalise_base_url
from gateway.settings.errors import SettingsError
from gateway.settings.pair_checks import addresses_of
from gateway.settings.schema import Settings
from gateway.strategy.wish import Wish, parse_query_value, parse_strategy, parse_word

HEADER = "X-Cache-Mode"
BODY_FIELDS = ("cacheStrategy", "cache_strategy", "cache_mode")  # ours alone: removed before an upstream sees the body
QUERY_FIELDS = ("cacheStrategy", "cache_strategy", "cache_mode")

Sourced = tuple[StrategySource, Wish]


def resolve_strategy(
    *,
    settings: Settings,
    header: str | None = None,
    body: Mapping[str, Any] | None = None,
    query: Mapping[str, str] | None = None,
    path_mode: str | None = None,
    model: str | None = None,
    key_mode: CacheMode | None = None,
    cache_salt: str = "",
    known_models: Container[str] = (),
) -> tuple[CacheStrategy, str | None]:
    """The strategy, and the model's name without a mode suffix. Raises InvalidRequest naming channel and values."""
    model, suffix = split_model_suffix(model, known_models)
    channels = {
        StrategySource.HEADER: header,
        StrategySource.PATH: path_mode,
        StrategySource.MODEL: suffix,
    }
    wishes = list(_wishes(channels, body or {}, query or {}))
    notices: list[str] = []
    source, mode, requested = _choose_mode(wishes, key_mode, settings, notices)
    details = _details(mode, wishes, settings, notices)
    strategy = CacheStrategy(
        mode, source, requested, cache_salt=cache_salt, notices=tuple(dict.fromkeys(notices)), **details
    )
    return strategy, model


def split_model_suffix(model: str | None, known_models: Container[str]) -> tuple[str | None, str | None]:
    """`("smollm2", "split")` for `smollm2:split`. Only these exact suffixes, and never of a name that is served."""
    if model is None or model in known_models:
        return model, None
    name, separator, suffix = model.rpartition(":")
    if separator and name and suffix in tuple(CacheMode):
        return name, suffix
    return model, None


def _wishes(
    words: Mapping[StrategySource, str | None], body: Mapping[str, Any], query: Mapping[str, str]
) -> Iterator[Sourced]:
    """What each channel says, in order of precedence."""
    found: list[tuple[StrategySource, Wish | None]] = []
    found.append((StrategySource.HEADER, parse_word(words[StrategySource.HEADER] or "", HEADER)))
    for name in BODY_FIELDS:
        found.append((StrategySource.BODY, _body_field(name, body.get(name))))
    for name in QUERY_FIELDS:
        found.append((StrategySource.QUERY, parse_query_value(query.get(name) or "", f"query {name}")))
    found.append((StrategySource.PATH, parse_word(words[StrategySource.PATH] or "", "path")))
    found.append((StrategySource.MODEL, parse_word(words[StrategySource.MODEL] or "", "model suffix")))
    return ((source, wish) for source, wish in found if wish is not None)


def _body_field(name: str, value: Any) -> Wish | None:
    if name == "cache_mode" and value is not None and not isinstance(value, str):
        raise InvalidRequest("cache_mode must be a mode; an object goes in cacheStrategy", param=name)
    return parse_strategy(value, name)


def _choose_mode(
    wishes: list[Sourced], key_mode: CacheMode | None, settings: Settings, notices: list[str]
) -> tuple[StrategySource, CacheMode, str | None]:
    spoken = [(source, wish.mode, wish) for source, wish in wishes if wish.mode is not None]
    if not spoken:
        if key_mode is not None:
            return StrategySource.KEY, key_mode, None
        return StrategySource.DEFAULT, settings.cache_layout.mode, None
    source, mode, winner = spoken[0]
    for _, other, loser in spoken[1:]:
        if other is not mode:
            notices.append(f"{winner.channel} says {mode} and wins over {loser.channel}, which says {other}")
    return source, mode, winner.requested


def _details(mode: CacheMode, wishes: list[Sourced], settings: Settings, notices: list[str]) -> dict[str, Any]:
    """Everything but the mode; says what is adjusted or has no effect."""
    layout = settings.cache_layout
    enable_prefix_cache, _ = _first(wishes, "enable_prefix_cache")
    kv_cache_dtype, _ = _first(wishes, "kv_cache_dtype")
    prefill, decode = _endpoints(mode, wishes, settings, notices)
    _prefix_notice(enable_prefix_cache, settings, notices)
    _concurrency_notice(wishes, settings, notices)
    return {
        "chunk_size": _chunk_size(mode, wishes, settings, notices),
        "kv_cache_dtype": kv_cache_dtype or "auto",
        "enable_prefix_cache": layout.enable_prefix_cache if enable_prefix_cache is None else enable_prefix_cache,
        "transfer_mode": _transfer_mode(mode, wishes, notices),
        "prefill_endpoint": prefill,
        "decode_endpoint": decode,
    }


def _first(wishes: list[Sourced], part: str) -> tuple[Any, str]:
    """The value of the highest channel that gives this part, and that channel."""
    for _, wish in wishes:
        value = getattr(wish, part)
        if value is not None:
            return value, wish.channel
    return None, ""


def _chunk_size(mode: CacheMode, wishes: list[Sourced], settings: Settings, notices: list[str]) -> int | None:
    asked, channel = _first(wishes, "chunk_size")
    size = settings.cache_layout.chunk_size if asked is None else asked
    if size is None:
        return None
    try:
        rounded, remarks = round_chunk_size(size, "chunkSize")
    except ValueError as error:
        raise InvalidRequest(f"{channel}.chunkSize {error}", param=f"{channel}.chunkSize") from None
    if mode is CacheMode.SPLIT:
        if asked is not None:
            notices.append("chunkSize has no effect in split, where the prefill side chunks by itself")
        return None
    if asked is not None:  # the settings' own was remarked upon at start
        notices += remarks
    return rounded


def _transfer_mode(mode: CacheMode, wishes: list[Sourced], notices: list[str]) -> Any:
    asked, _ = _first(wishes, "transfer_mode")
    if asked is not None and mode is CacheMode.MERGED:
        notices.append("kvTransferProtocol has no effect in merged, where no KV is transferred")
        return None
    return asked


def _endpoints(
    mode: CacheMode, wishes: list[Sourced], settings: Settings, notices: list[str]
) -> tuple[str | None, str | None]:
    """Only addresses that the settings name: a request must not choose where this server connects to."""
    layout, base = settings.cache_layout, settings.server.api_base
    values: list[str | None] = []
    asked = False
    for part, configured in (
        ("prefill_endpoint", layout.prefill_endpoint),
        ("decode_endpoint", layout.decode_endpoint),
    ):
        value, channel = _first(wishes, part)
        asked = asked or value is not None
        own = _address(value, addresses_of(settings, part.removesuffix("_endpoint")))
        if own is None and value is not None and _address(value, (configured, base)) is None:
            name = "prefillEndpoint" if part == "prefill_endpoint" else "decodeEndpoint"
            raise InvalidRequest(
                f"{channel}.{name} is not an address that this gateway is set up for; leave it out, or use the "
                "unified upstream's base URL or a server of [[pairs]]. Endpoints are chosen in the settings, not by a "
                "request",
                param=f"{channel}.{name}",
            )
        values.append(own or configured or (base if value is not None else None))
    if mode is CacheMode.MERGED:
        if asked:
            notices.append("prefillEndpoint and decodeEndpoint have no effect in merged")
        return None, None
    return values[0], values[1]


def _address(value: str | None, allowed: tuple[str | None, ...]) -> str | None:
    """The URL as the settings have it, if they do: with or without /v1, which every base URL may end with."""
    try:
        place = None if value is None else normalise_base_url(value)[0].removesuffix("/v1")
    except SettingsError:
        return None
    return next((url for url in allowed if url is not None and url.removesuffix("/v1") == place), None)


def _prefix_notice(asked: bool | None, settings: Settings, notices: list[str]) -> None:
    if asked and settings.effective_engine() and not settings.scheduler.enable_prefix_cache:
        notices.append("enablePrefixCache has no effect: the engine's prefix cache is off in the settings")


def _concurrency_notice(wishes: list[Sourced], settings: Settings, notices: list[str]) -> None:
    asked, _ = _first(wishes, "max_transfer_concurrency")
    used = settings.transfer.max_transfer_concurrency
    if asked is not None and asked != used:
        notices.append(f"maxTransferConcurrency is fixed when the engine starts: {used} is used")
