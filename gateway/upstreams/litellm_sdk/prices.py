"""What tokens cost and how long a context may be, from the table that litellm ships. litellm itself is not imported.

The table is read in a thread when it is first asked for. What it doesn't know is None, never a guess.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from backends.protocol.messages import Usage

TABLE = "model_prices_and_context_window_backup.json"
_TIER = re.compile(r"_above_(\d+)k_tokens$")


def shipped_table() -> Path | None:
    """Where it is, found without importing the package."""
    spec = find_spec("litellm")
    folders = spec.submodule_search_locations if spec is not None else None
    found = [path for path in (Path(folder) / TABLE for folder in folders or ()) if path.is_file()]
    return found[0] if found else None


class Prices:
    """By a model's name as litellm writes it: `PROVIDER/MODEL`, or the model alone."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._table: dict[str, msgspec.Raw] | None = None
        self._known: dict[str, Mapping[str, Any]] = {}
        self._lock = asyncio.Lock()

    async def look_up(self, model: str) -> None:
        """What is asked of a model needs no waiting afterwards."""
        await self._facts(model)

    def cost_usd(self, model: str, usage: Usage) -> float | None:
        facts = self._known.get(model)
        return None if facts is None else cost_usd(facts, usage)

    def is_priced(self, model: str) -> bool:
        return self.cost_usd(model, Usage(prompt_tokens=0, completion_tokens=0)) is not None

    async def max_model_len(self, model: str) -> int | None:
        """The longest prompt, as the table says."""
        facts = await self._facts(model) or {}
        sizes = [facts.get(name) for name in ("max_input_tokens", "max_tokens")]
        return next((size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and size > 0), None)

    async def _facts(self, model: str) -> Mapping[str, Any] | None:
        if model in self._known:
            return self._known[model]
        async with self._lock:
            if self._table is None:
                self._table = await asyncio.to_thread(_read, self._path)
        facts = _find(self._table, model)
        if facts is not None:  # other names are a client's to invent
            self._known[model] = facts
        return facts


def cost_usd(facts: Mapping[str, Any], usage: Usage) -> float | None:
    """Of one answer. Tokens written to a provider's cache count as plain prompt tokens: usage doesn't tell them."""
    prompt = _price(facts, "input_cost_per_token", usage.prompt_tokens)
    answer = _price(facts, "output_cost_per_token", usage.prompt_tokens)
    if prompt is None or answer is None:
        return None
    cached = _price(facts, "cache_read_input_token_cost", usage.prompt_tokens)
    num_cached = min(max(0, usage.cached_tokens), usage.prompt_tokens)
    paid = (usage.prompt_tokens - num_cached) * prompt + num_cached * (prompt if cached is None else cached)
    return paid + usage.completion_tokens * answer


def _price(facts: Mapping[str, Any], name: str, prompt_tokens: int) -> float | None:
    """Of one token. Long prompts may cost more: the highest tier that this one has passed counts."""
    price, reached = facts.get(name), 0
    for key, value in facts.items():
        tier = _TIER.search(key) if key.startswith(name) else None
        if tier is None or key != name + tier.group():
            continue
        limit = int(tier.group(1)) * 1000
        if reached < limit < prompt_tokens:
            price, reached = value, limit
    return float(price) if isinstance(price, int | float) and not isinstance(price, bool) and price >= 0 else None


def _find(table: Mapping[str, msgspec.Raw], model: str) -> Mapping[str, Any] | None:
    """The entry of the full name, else of the model alone if it is that provider's."""
    facts = _decode(table.get(model))
    if facts is not None or "/" not in model:
        return facts
    provider, _, bare = model.partition("/")
    facts = _decode(table.get(bare))
    said = facts.get("litellm_provider") if facts is not None else None
    return facts if isinstance(said, str) and said.partition("-")[0] == provider.partition("_")[0] else None


def _decode(raw: msgspec.Raw | None) -> Mapping[str, Any] | None:
    if raw is None:
        return None
    found = msgspec.json.decode(raw)
    return found if isinstance(found, dict) else None


def _read(path: Path | None) -> dict[str, msgspec.Raw]:
    """Entries stay bytes until one is asked for."""
    if path is None:
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    except (OSError, msgspec.MsgspecError):
        return {}
