"""Settings from KVGATE_* environment variables and from command-line flags. Names and values in, entries out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gateway.settings.entries import Draft, Entry, Origin
from gateway.settings.options import is_list, list_tables, native_tables, nearest_or_all

PREFIX = "KVGATE_"
CONFIG_VARIABLE = "KVGATE_CONFIG"
# Read elsewhere, so no options: settings file, key of the client commands, log level of all processes, models' cache.
OTHER_VARIABLES = (
    CONFIG_VARIABLE,
    "KVGATE_KEY",
    "KVGATE_LOG_LEVEL",
    "KVGATE_CACHE_DIR",
    "KVGATE_NATIVE",
    "KVGATE_WEIGHT_FILES",
    "KVGATE_BENCH_VLLM",
    "KVGATE_BENCH_LLAMA",
)

FLAG_NAMES = {
    "server.host": "--host",
    "server.port": "--port",
    "server.api_base": "--upstream",
    "server.api_key": "--upstream-key-env",
    "cache_layout.mode": "--mode",
    "engine.model": "--model",
    "engine.enabled": "--no-engine",
}


def read_environment(environ: Mapping[str, str], draft: Draft) -> list[Entry]:
    """Entries of all KVGATE_ variables. A name that is none becomes a problem: a typo must not go unseen."""
    entries: list[Entry] = []
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in OTHER_VARIABLES:
            continue
        origin = Origin(name, "environment")
        table, _, key = name.removeprefix(PREFIX).lower().partition("__")
        known = table in native_tables() and (not key or key in native_tables()[table])
        if not known or (key and table in list_tables()):
            draft.problems.append(f"{origin}: unknown variable; {nearest_or_all(name, _variables())}")
        elif not environ[name].strip():
            draft.notices.append(f"{origin} is empty and counts as not set")
        elif key:
            entries.append(Entry((table, key), _value(table, key, environ[name], origin, draft), origin))
        else:
            entries += _whole_table(table, environ[name], origin, draft)
    return entries


def read_flags(flags: Mapping[str, Any]) -> list[Entry]:
    """Entries of `{"server.port": 9000}`; None means that a flag was not given."""
    return [
        Entry(tuple(option.split(".")), value, Origin(FLAG_NAMES.get(option, option), "command line"))
        for option, value in flags.items()
        if value is not None
    ]


def _variables() -> list[str]:
    tables = native_tables()
    single = [
        f"{PREFIX}{table}__{key}".upper() for table in tables if table not in list_tables() for key in tables[table]
    ]
    return [*OTHER_VARIABLES, *single, *(f"{PREFIX}{table}".upper() for table in list_tables())]


def _value(table: str, key: str, text: str, origin: Origin, draft: Draft) -> Any:
    """Lists are written as JSON or with commas; everything else is left to the schema."""
    if not is_list(table, key):
        return text
    if text.lstrip().startswith("["):
        return _json(text, origin, draft)
    return [item.strip() for item in text.split(",")]


def _whole_table(table: str, text: str, origin: Origin, draft: Draft) -> list[Entry]:
    """A table, or a list of tables, as JSON."""
    value = _json(text, origin, draft)
    rows = value if isinstance(value, list) and table in list_tables() else [value]
    entries: list[Entry] = []
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            draft.problems.append(
                f"{origin}: must be JSON, {'a list of objects' if table in list_tables() else 'an object'}"
            )
            return []
        for key, item in row.items():
            if key not in native_tables()[table]:
                draft.problems.append(
                    f"{origin}: unknown setting {key!r}; {nearest_or_all(key, native_tables()[table])}"
                )
                continue
            entries.append(Entry((table, i, key) if table in list_tables() else (table, key), item, origin))
    return entries


def _json(text: str, origin: Origin, draft: Draft) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        draft.problems.append(f"{origin}: is not valid JSON")
        return None
