"""Makes the targets of a generation of the settings. What the settings left as it was goes on being used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gateway.parts import Close, PartUser, nothing
from gateway.routing.instance_choice import InstanceChoice
from gateway.routing.server_breaker import ServerBreaker
from gateway.settings.schema import PairSettings, Settings, TargetSettings, TimeoutSettings
from gateway.upstreams.http.clients import HttpClients
from gateway.upstreams.http.openai_http import OpenAIHttpUpstream
from gateway.upstreams.litellm_sdk.library import Library
from gateway.upstreams.litellm_sdk.prices import Prices
from gateway.upstreams.litellm_sdk.target import LitellmUpstream
from gateway.upstreams.pd.upstream import PairUpstream
from gateway.web.generation import Target


class TargetMaker:
    """One for the gateway's whole life. `leg_failed` counts failures of a pair's servers: its name, and which side."""

    def __init__(self, hop_id: str, prices: Prices, library: Library, leg_failed: Callable[[str, str], None]) -> None:
        self._hop_id = hop_id
        self._prices = prices
        self._library = library
        self._leg_failed = leg_failed

    def make(self, settings: Settings, parts: PartUser) -> dict[str, Target]:
        """Every target by its name, in the settings' order."""
        timeouts = settings.timeouts
        clients = take_clients(timeouts, parts)
        return {target.name: self._target(target, timeouts, clients, parts) for target in all_targets(settings)}

    def make_pairs(self, settings: Settings, parts: PartUser) -> dict[str, PairUpstream]:
        """The same of `[[pairs]]`. One that is new is watched from now on; nothing here waits for its servers."""
        if not settings.pairs:
            return {}
        timeouts = settings.timeouts
        clients = take_clients(timeouts, parts)
        return {pair.name: self._pair(pair, timeouts, clients, parts) for pair in settings.pairs}

    def _target(
        self, target: TargetSettings, timeouts: TimeoutSettings, clients: HttpClients, parts: PartUser
    ) -> Target:
        def make() -> tuple[Target, Close]:
            if target.kind == "litellm":
                return LitellmUpstream(target, timeouts, self._library, self._prices), nothing
            return OpenAIHttpUpstream(target, clients, timeouts, self._hop_id), nothing

        return parts.take((target, _felt(timeouts)), make)

    def _pair(
        self, pair: PairSettings, timeouts: TimeoutSettings, clients: HttpClients, parts: PartUser
    ) -> PairUpstream:
        def make() -> tuple[PairUpstream, Close]:
            upstream = PairUpstream(
                pair,
                clients,
                timeouts,
                self._hop_id,
                make_chooser=InstanceChoice,
                make_breaker=lambda: ServerBreaker(pair.breaker_failures, pair.breaker_seconds),
                on_failure=partial(self._leg_failed, pair.name),
            )
            upstream.start()
            return upstream, upstream.close

        return parts.take((pair, _felt(timeouts)), make)


def all_targets(settings: Settings) -> list[TargetSettings]:
    """The named targets, and the unified upstream as one more."""
    server = settings.server
    if server.api_base is None:
        return list(settings.targets)
    unified = TargetSettings(
        name=server.name,
        base_url=server.api_base,
        api_key=server.api_key,
        forward_client_key=server.forward_client_key,
        price_model=server.api_price_model,
        dialects=server.api_dialects,
        health_path=server.api_health_path,
    )
    return [*settings.targets, unified]


def _felt(timeouts: TimeoutSettings) -> tuple[float, ...]:
    """The limits that act on upstreams: a change of the others leaves connections and what was learnt as they are."""
    return timeouts.connect_seconds, timeouts.first_byte_seconds, timeouts.idle_seconds


def take_clients(timeouts: TimeoutSettings, parts: PartUser) -> HttpClients:
    return parts.take(("clients", _felt(timeouts)), lambda: _clients(timeouts))


def _clients(timeouts: TimeoutSettings) -> tuple[HttpClients, Close]:
    clients = HttpClients(timeouts)
    return clients, clients.close
