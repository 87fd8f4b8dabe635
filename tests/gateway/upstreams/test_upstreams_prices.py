"""What an answer costs, and how long a context is, by the table; what isn't known is None."""

from __future__ import annotations

import json

import pytest

from backends.protocol.messages import Usage
from gateway.core.types import Route
from gateway.settings.schema import ServerSettings, Settings, TargetSettings
from gateway.upstreams.litellm_sdk.price_book import PriceBook
from gateway.upstreams.litellm_sdk.prices import Prices, cost_usd, shipped_table

TABLE = {
    "gpt-x": {
        "litellm_provider": "openai", "input_cost_per_token": 2e-6, "output_cost_per_token": 8e-6,
        "cache_read_input_token_cost": 5e-7, "max_input_tokens": 128000, "max_tokens": 16384,
    },
    "claude": {
        "litellm_provider": "anthropic", "input_cost_per_token": 3e-6, "output_cost_per_token": 15e-6,
        "input_cost_per_token_above_200k_tokens": 6e-6, "output_cost_per_token_above_200k_tokens": 22.5e-6,
    },
    "free": {"litellm_provider": "x", "input_cost_per_token": 0, "output_cost_per_token": 0.0},
    "odd": {"litellm_provider": 3, "input_cost_per_token": "cheap", "max_tokens": "LLM"},
    "sample_spec": "text",
}  # fmt: skip


@pytest.fixture
def prices(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(TABLE))
    return Prices(path)


def used(prompt, completion, cached=0):
    return Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)


async def cost(prices, model, usage):
    await prices.look_up(model)
    return prices.cost_usd(model, usage)


async def test_prompt_cache_and_answer_have_prices_of_their_own(prices):
    assert await cost(prices, "gpt-x", used(1000, 100, cached=600)) == pytest.approx(
        400 * 2e-6 + 600 * 5e-7 + 100 * 8e-6
    )


async def test_without_a_price_for_the_cache_its_tokens_cost_like_any(prices):
    assert await cost(prices, "claude", used(1000, 0, cached=1000)) == pytest.approx(1000 * 3e-6)


async def test_a_long_prompt_has_the_price_of_its_tier(prices):
    assert await cost(prices, "claude", used(200_000, 1)) == pytest.approx(200_000 * 3e-6 + 15e-6)
    assert await cost(prices, "claude", used(200_001, 1)) == pytest.approx(200_001 * 6e-6 + 22.5e-6)


async def test_a_provider_s_name_before_the_model_s_is_understood_if_it_is_that_provider_s(prices):
    assert await cost(prices, "openai/gpt-x", used(1, 0)) == pytest.approx(2e-6)
    assert await cost(prices, "azure/gpt-x", used(1, 0)) is None


@pytest.mark.parametrize("model", ["nobody", "odd", "sample_spec", "", "a/b/c"])
async def test_what_is_not_known_is_none(prices, model):
    assert await cost(prices, model, used(1, 1)) is None
    assert not prices.is_priced(model)


async def test_free_is_a_price(prices):
    assert await cost(prices, "free", used(9, 9)) == 0
    assert prices.is_priced("free")


async def test_sizes(prices):
    assert await prices.max_model_len("gpt-x") == 128000
    assert await prices.max_model_len("odd") is None
    assert await prices.max_model_len("nobody") is None


@pytest.mark.parametrize("content", ["", "{", "[]"])
async def test_a_damaged_or_missing_table_knows_nothing(tmp_path, content):
    path = tmp_path / "table.json"
    path.write_text(content)
    for found in (path, tmp_path / "none.json", None):
        assert await cost(Prices(found), "gpt-x", used(1, 1)) is None


async def test_names_that_clients_invent_are_not_kept(prices):
    for i in range(50):
        await prices.look_up(f"invented-{i}")
    assert prices._known == {}


def test_more_cached_than_read_costs_no_less_than_nothing():
    assert cost_usd(TABLE["gpt-x"], used(10, 0, cached=99)) == pytest.approx(10 * 5e-7)


async def test_the_settings_say_which_entry_counts(prices):
    settings = Settings(
        server=ServerSettings(api_base="http://127.0.0.1:9"),
        targets=(
            TargetSettings(name="far", kind="litellm"),
            TargetSettings(name="one", base_url="http://127.0.0.1:9", price_model="gpt-x"),
            TargetSettings(name="many", base_url="http://127.0.0.1:9", price_model="openai/{model}"),
            TargetSettings(name="none", base_url="http://127.0.0.1:9"),
        ),
    )
    book = PriceBook.of(settings, prices)
    known = {
        "far": "openai/gpt-x",
        "one": "anything",
        "many": "gpt-x",
        "none": "gpt-x",
        "upstream": "gpt-x",
        "local": "m",
    }
    routes = {target: Route(target, model, "test") for target, model in known.items()}
    for route in routes.values():
        await book.look_up(route)

    costs = {target: book.cost_usd(route, used(1_000_000, 0)) for target, route in routes.items()}
    assert costs == {"far": 2.0, "one": 2.0, "many": 2.0, "none": None, "upstream": None, "local": None}
    assert {target for target, route in routes.items() if book.is_unknown(route)} == {"none", "upstream"}


@pytest.mark.skipif(shipped_table() is None, reason="litellm is not installed")
async def test_the_shipped_table_knows_common_models():
    found = Prices(shipped_table())
    for model in ("gpt-4o", "openai/gpt-4o", "anthropic/claude-sonnet-4-5"):
        assert (await cost(found, model, used(1_000_000, 0)) or 0) > 0.1
        assert (await found.max_model_len(model) or 0) >= 100_000
