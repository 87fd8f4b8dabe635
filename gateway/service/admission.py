"""Lets a call in, if its key may make it, and settles with the key when it is over.

One for all generations of the settings: what runs and what was used stays counted when the settings are read again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from backends.protocol.messages import Usage
from gateway.core.errors import BudgetExhausted, GatewayError, KeyForbids, RateLimited
from gateway.core.types import Route
from gateway.service.call import Call
from gateway.service.exchange import Exchange
from gateway.service.key_limits import KeyLimits, check_allowed, is_limited, tokens_needed
from gateway.settings.schema import KeySettings
from gateway.upstreams.litellm_sdk.price_book import PriceBook

_REASONS: dict[type[GatewayError], str] = {RateLimited: "rate", BudgetExhausted: "budget", KeyForbids: "not_allowed"}
_TOKEN_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class Admission:
    def __init__(
        self,
        limits: KeyLimits | None = None,
        prices: PriceBook | None = None,
        count_refusal: Callable[[str, str], None] = lambda key, reason: None,
    ) -> None:
        self.num_in_flight = 0
        self.prices = prices or PriceBook.empty()
        self._limits = limits or KeyLimits(time.monotonic)
        self._count_refusal = count_refusal

    async def admit(self, exchange: Exchange, routes: Sequence[Route]) -> None:
        """`routes`: everywhere that the call may be sent. Raises what the key doesn't allow."""
        exchange.prices = self.prices
        for route in routes:
            await self.prices.look_up(route)
        key = exchange.call.key
        if key is None:
            return
        try:
            self._admit(exchange, key, routes)
        except GatewayError as error:
            self._count_refusal(key.name, _REASONS.get(type(error), "other"))
            raise

    def _admit(self, exchange: Exchange, key: KeySettings, routes: Sequence[Route]) -> None:
        strategy = exchange.strategy
        assert strategy is not None, "a call is understood before it is let in"
        check_allowed(key, exchange.model or routes[0].upstream_model, strategy.mode)
        if not is_limited(key):
            return  # most keys: nothing of theirs is counted
        if key.budget_usd is not None:
            self._check_priced(key, routes)
        exchange.limit_headers = partial(self._limits.headers, key)
        exchange.permit = self._limits.admit(key, _tokens_needed(exchange.call))

    def _check_priced(self, key: KeySettings, routes: Sequence[Route]) -> None:
        """What costs an unknown amount can't be kept within a budget."""
        for route in routes:
            if self.prices.is_unknown(route):
                raise KeyForbids(
                    f"Key {key.name!r} has a budget, and the price of model {route.upstream_model[:100]!r} at target "
                    f"{route.target!r} is not known. Set its price_model (api_price_model of the unified one).",
                    param="model",
                )

    def settle(self, exchange: Exchange) -> None:
        """Whatever became of it. What isn't known of an answer that was under way is estimated, not forgiven."""
        usage = exchange.usage if exchange.usage is not None else _estimate(exchange)
        cost = None
        if usage is not None and exchange.prices is not None:  # those that were in force when it came
            cost = exchange.prices.cost_usd(exchange.route, usage)
        exchange.cost_usd = cost if exchange.usage is not None else None
        if exchange.permit is not None:
            tokens = usage.prompt_tokens + usage.completion_tokens if usage is not None else 0
            exchange.permit.done(tokens=tokens, cost_usd=cost)


def _estimate(exchange: Exchange) -> Usage | None:
    """Of an answer that broke off, or whose upstream counts nothing. None: nobody has taken the request."""
    if not exchange.accepted:
        return None
    prompt = tokens_needed(len(exchange.call.body.data), ())
    return Usage(prompt_tokens=prompt, completion_tokens=exchange.clock.num_chunks)


def _tokens_needed(call: Call) -> int:
    fields = call.body.fields
    limits: list[Any] = [call.body.value(name) for name in _TOKEN_LIMITS if name in fields]
    config = call.body.value("generationConfig") if "generationConfig" in fields else None
    if isinstance(config, dict):
        limits.append(config.get("maxOutputTokens"))
    return tokens_needed(len(call.body.data), limits)
