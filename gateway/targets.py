"""Makes the targets of a generation of the settings. What the settings left as it was goes on being used."""

from __future__ import annotations

from gateway.parts import Close, PartUser, nothing
from gateway.settings.schema import Settings, TargetSettings, TimeoutSettings
from gateway.upstreams.litellm_library import Library
from gateway.upstreams.litellm_target import LitellmUpstream
from gateway.upstreams.openai_http import HttpClients, OpenAIHttpUpstream
from gateway.upstreams.prices import Prices
from gateway.web.generation import Target


class TargetMaker:
    """One for the gateway's whole life."""

    def __init__(self, hop_id: str, prices: Prices, library: Library) -> None:
        self._hop_id = hop_id
        self._prices = prices
        self._library = library

    def make(self, settings: Settings, parts: PartUser) -> dict[str, Target]:
        """Every target by its name, in the settings' order."""
        timeouts = settings.timeouts
        clients = parts.take(("clients", timeouts), lambda: _clients(timeouts))
        found: dict[str, Target] = {}
        for target in all_targets(settings):
            found[target.name] = self._target(target, timeouts, clients, parts)
        return found

    def _target(
        self, target: TargetSettings, timeouts: TimeoutSettings, clients: HttpClients, parts: PartUser
    ) -> Target:
        def make() -> tuple[Target, Close]:
            if target.kind == "litellm":
                return LitellmUpstream(target, timeouts, self._library, self._prices), nothing
            return OpenAIHttpUpstream(target, clients, timeouts, self._hop_id), nothing

        return parts.take((target, timeouts), make)


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
    )
    return [*settings.targets, unified]


def _clients(timeouts: TimeoutSettings) -> tuple[HttpClients, Close]:
    clients = HttpClients(timeouts)
    return clients, clients.close
