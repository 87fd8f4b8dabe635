"""What the limits of a client key mean together, and with what they limit. Pure, as `checks` is."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.settings.entries import Draft
from gateway.settings.schema import Settings


def key_refusals(settings: Settings, draft: Draft) -> Iterator[str]:
    default = settings.cache_layout.mode
    for i, key in enumerate(settings.keys):
        mode = key.mode or default
        if key.modes and mode not in key.modes:
            place = draft.origin_of(("keys", i, "modes"))
            whose = "its own mode" if key.mode else "the default mode"
            allowed = ", ".join(key.modes)
            yield f"{place}: {whose}, {mode}, is not among them; set the key's mode to {allowed}"


def key_advice(settings: Settings, draft: Draft) -> Iterator[str]:
    limited = [key.name for key in settings.keys if key.budget_usd is not None]
    if limited:
        place = draft.origin_of(("keys",))
        yield f"{place}: what {', '.join(limited)} has spent is kept in memory: a restart begins its budget anew"
    for i, key in enumerate(settings.keys):
        if "budget_period" in key.model_fields_set and key.budget_usd is None:
            yield f"{draft.origin_of(('keys', i, 'budget_period'))}: no effect without budget_usd"
