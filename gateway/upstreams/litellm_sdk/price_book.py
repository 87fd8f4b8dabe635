"""Which entry of the price table counts at which target, as the settings say it."""

from __future__ import annotations

from collections.abc import Mapping

from backends.protocol.messages import Usage
from gateway.core.types import Route
from gateway.settings.schema import Settings, TargetSettings
from gateway.upstreams.litellm_sdk.prices import Prices

_MODEL = "{model}"


class PriceBook:
    """Targets that cost money: [[targets]], and the unified upstream. What runs on one's own machines costs nothing."""

    def __init__(self, names: Mapping[str, str | None], prices: Prices) -> None:
        """`names`: target -> its price model; None = it costs something, and nobody says what."""
        self.table = prices
        self._names = names

    @classmethod
    def empty(cls) -> PriceBook:
        return cls({}, Prices(None))

    @classmethod
    def of(cls, settings: Settings, prices: Prices) -> PriceBook:
        names: dict[str, str | None] = {target.name: _price_model(target) for target in settings.targets}
        if settings.server.api_base:
            names.setdefault(settings.server.name, settings.server.api_price_model)
        return cls(names, prices)

    async def look_up(self, route: Route) -> None:
        """Before anything is asked of the route; the rest needs no waiting then."""
        name = self._name(route)
        if name is not None:
            await self.table.look_up(name)

    def is_unknown(self, route: Route) -> bool:
        """Whether the route costs something, and it isn't known what."""
        if route.target not in self._names:
            return False
        name = self._name(route)
        return name is None or not self.table.is_priced(name)

    def cost_usd(self, route: Route | None, usage: Usage) -> float | None:
        """None where it isn't known."""
        name = self._name(route) if route is not None else None
        return None if name is None else self.table.cost_usd(name, usage)

    def _name(self, route: Route) -> str | None:
        pattern = self._names.get(route.target)
        return None if pattern is None else pattern.replace(_MODEL, route.upstream_model)


def _price_model(target: TargetSettings) -> str | None:
    if target.price_model is not None:
        return target.price_model
    return _MODEL if target.kind == "litellm" else None
