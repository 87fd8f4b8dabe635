"""Settings that are read again while the gateway runs: what can take effect, and what waits for a restart. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.settings import checks
from gateway.settings.entries import Draft
from gateway.settings.errors import SettingsError
from gateway.settings.schema import EngineSettings, Settings

# Sockets, processes and stores are made of these once. An empty tuple = the whole table.
FIXED: dict[str, tuple[str, ...]] = {
    "server": ("host", "port", "watch_settings"),
    "cache_layout": ("prefill_gpus", "decode_gpus", "merged_gpus"),
    "kv_cache": (),
    "scheduler": (),
    "transfer": (),
    "limits": ("max_request_mib", "max_records"),
    "timeouts": ("shutdown_seconds",),
}


def take_over(running: Settings, read: Settings) -> tuple[Settings, tuple[str, ...]]:
    """What is in force from now on, and the names of changed options that are left as they were.

    Raises SettingsError where the new options don't go together with those that stay.
    """
    engine, left = _engine(running, read)
    update: dict[str, Any] = {"engine": engine}
    for table, names in FIXED.items():
        old, new = getattr(running, table), getattr(read, table)
        changed = [name for name in names or type(new).model_fields if getattr(old, name) != getattr(new, name)]
        left += [f"{table}.{name}" for name in changed]
        update[table] = new.model_copy(update={name: getattr(old, name) for name in changed})
    settings = read.model_copy(update=update)
    if left:
        problems = list(checks.refusals(settings, Draft()))
        if problems:
            waiting = ", ".join(left)
            raise SettingsError([*problems, f"these options keep their values until a restart: {waiting}"])
    return settings, tuple(left)


def _engine(running: Settings, read: Settings) -> tuple[EngineSettings | None, list[str]]:
    """The bundled engine goes on running, or not running, whatever the settings say now."""
    old, new = running.effective_engine(), read.effective_engine()
    if old == new:
        return read.engine, []
    if old is None:
        return EngineSettings(enabled=False), ["engine"]
    return old, list(_changed(old, new))


def _changed(old: EngineSettings, new: EngineSettings | None) -> Iterator[str]:
    if new is None:
        yield "engine.enabled"
        return
    yield from (f"engine.{name}" for name in EngineSettings.model_fields if getattr(old, name) != getattr(new, name))
