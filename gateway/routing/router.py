"""Which target answers for a model. Pure: settings and model cards in, a `Route` with its reason out."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from gateway.core.errors import InvalidRequest, ModelNotFound
from gateway.core.types import ModelCard, Route
from gateway.settings.schema import RouteSettings, Settings

_BY_ROUTE = "route "  # begins the reason of what [[routes]] decide


class Router:
    """A snapshot: build a new one when the model cards change.

    Order: forced target, [[routes]], the local model, models that targets list, the unified upstream for the rest.
    """

    def __init__(self, settings: Settings, cards: Iterable[ModelCard] = ()) -> None:
        self._settings = settings
        engine = settings.effective_engine()
        self._local_target = engine.name if engine else None
        self._local_model = engine.public_name() if engine else None
        self._catch_all = settings.server.name if settings.server.api_base else None
        self._listed = self._listed_models(cards)

    def _listed_models(self, cards: Iterable[ModelCard]) -> dict[str, dict[str, None]]:
        """Target -> its models, in order and once; the local one first."""
        listed: dict[str, dict[str, None]] = {}
        if self._local_target is not None and self._local_model is not None:
            listed[self._local_target] = {self._local_model: None}
        for target in self._settings.targets:
            listed[target.name] = dict.fromkeys(target.models)
        for pair in self._settings.pairs:
            listed[pair.name] = dict.fromkeys(pair.models)
        if self._catch_all is not None:
            listed.setdefault(self._catch_all, {})
        for card in cards:
            listed.setdefault(card.target, {})[card.id] = None
        return listed

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of all targets, as X-Cache-Backend takes them."""
        return tuple(self._listed)

    def model_names(self) -> tuple[str, ...]:
        """Every name that is known to be served, once: aliases of routes without a pattern, then listed models."""
        aliases = [route.model for route in self._settings.routes if not any(c in route.model for c in "*?[")]
        listed = [model for models in self._listed.values() for model in models]
        return tuple(dict.fromkeys([*aliases, *listed]))

    def route(self, model: str | None, forced_target: str | None = None) -> Route:
        """Raises InvalidRequest for an unknown target or no model at all, ModelNotFound for an unknown model."""
        forced = self._checked_target(forced_target)
        name = model or self._default_model(forced)
        if forced is not None:
            return self._forced(name, forced)
        return self._by_route(name) or self._by_list(name) or self._rest(name)

    def fallbacks(self, model: str | None, route: Route) -> tuple[Route, ...]:
        """Who else may answer, in order, if `route` fails; nobody where a client forced the target.

        A fallback's own name for the model is that of the route which matches the model and leads there, if any.
        """
        name = model or self._settings.server.model
        chosen = next(iter(self._matching(name)), None) if name else None
        if chosen is None or route.target != chosen.target or not route.reason.startswith(_BY_ROUTE):
            return ()
        return tuple(self._fallback(str(name), target) for target in chosen.fallbacks)

    def _fallback(self, model: str, target: str) -> Route:
        own = next((route.upstream_model for route in self._matching(model) if route.target == target), None)
        return self._to(target, model, own, f"{_BY_ROUTE}{self._matching(model)[0].model}")

    def _checked_target(self, forced: str | None) -> str | None:
        forced = (forced or "").strip()
        if not forced:
            return None
        for target in self._listed:
            if target.lower() == forced.lower():
                return target
        shown = ascii(forced[:40])
        names = ", ".join(self._listed) or "none"
        raise InvalidRequest(f"X-Cache-Backend: no target is named {shown}; targets: {names}", param="X-Cache-Backend")

    def _default_model(self, forced: str | None) -> str:
        only_local = self._local_model is not None and (forced or self._local_target) == self._local_target
        if only_local and (forced is not None or (len(self._listed) == 1 and not self._settings.server.model)):
            return str(self._local_model)
        if self._settings.server.model:
            return self._settings.server.model
        names = ", ".join(self.model_names()) or "none known"
        raise InvalidRequest(f"'model' is required: several targets are set up. Models: {names}", param="model")

    def _forced(self, model: str, target: str) -> Route:
        reason = "X-Cache-Backend"
        for route in self._matching(model):
            if route.target == target:
                return self._to(target, model, route.upstream_model, f"{reason}, route {route.model}")
        if target == self._local_target and model not in self._listed[target]:
            raise ModelNotFound(model, tuple(self._listed[target]))
        return self._to(target, model, None, reason)

    def _by_route(self, model: str) -> Route | None:
        for route in self._matching(model):
            return self._to(route.target, model, route.upstream_model, f"{_BY_ROUTE}{route.model}")
        return None

    def _matching(self, model: str) -> list[RouteSettings]:
        return [route for route in self._settings.routes if fnmatchcase(model, route.model)]

    def _by_list(self, model: str) -> Route | None:
        for target, models in self._listed.items():
            if model in models:
                return Route(target, model, "local model" if target == self._local_target else f"listed by {target}")
        return None

    def _rest(self, model: str) -> Route:
        if self._catch_all is None:
            raise ModelNotFound(model, self.model_names())
        return Route(self._catch_all, model, "unified upstream serves every other model")

    def _to(self, target: str, model: str, upstream_model: str | None, reason: str) -> Route:
        """The local engine has one model, whatever name a route gives it."""
        if target == self._local_target:
            return Route(target, str(self._local_model), reason)
        return Route(target, upstream_model or model, reason)
