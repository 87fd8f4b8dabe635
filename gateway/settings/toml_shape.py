"""Settings in TOML: the native layout form, and the form with [provider] and [cache]. Text in, entries out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomli

from gateway.settings.entries import Draft, Entry, Origin, Path, dotted
from gateway.settings.errors import SettingsError
from gateway.settings.lines import key_lines
from gateway.settings.options import Tables, is_mapping, list_tables, native_tables, suggestion

# The provider form's own names -> native options. Its [request] is the native one.
PROVIDER_FORM: dict[Path, Path] = {
    ("provider", "name"): ("server", "name"),
    ("provider", "base_url"): ("server", "api_base"),
    ("provider", "api_key"): ("server", "api_key"),
    ("provider", "model"): ("server", "model"),
    ("cache", "mode"): ("cache_layout", "mode"),
    ("cache", "chunk_size"): ("cache_layout", "chunk_size"),
    ("cache", "kv_cache_dtype"): ("kv_cache", "kv_cache_dtype"),
    ("cache", "prefix_cache"): ("cache_layout", "enable_prefix_cache"),
    ("cache", "split", "prefill_base_url"): ("cache_layout", "prefill_endpoint"),
    ("cache", "split", "decode_base_url"): ("cache_layout", "decode_endpoint"),
    ("cache", "split", "transfer_protocol"): ("transfer", "kv_transfer_mode"),
    ("cache", "split", "max_transfer_concurrency"): ("transfer", "max_transfer_concurrency"),
}


def parse_toml(text: str, source: str) -> dict[str, Any]:
    try:
        return tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise SettingsError(f"{source}: not valid TOML: {error}") from None
    except RecursionError:
        raise SettingsError(f"{source}: not valid TOML: the values are nested too deeply") from None


def is_provider_form(tree: Mapping[str, Any]) -> bool:
    return "provider" in tree or "cache" in tree


def read_tree(tree: Mapping[str, Any], text: str, source: str, draft: Draft) -> list[Entry]:
    """Entries of either TOML form. Names that are not options become problems of the draft."""
    aliases = PROVIDER_FORM if is_provider_form(tree) else {}
    tables = _known_tables(aliases)
    lines = key_lines(text)
    entries: dict[Path, Entry] = {}
    for path, value in _leaves(tree, (), aliases):
        origin = Origin(dotted(path), source, _line_of(path, lines))
        target = aliases.get(path, path)
        problem = None if path in aliases else _unknown(path, value, tables)
        if problem is not None:
            draft.problems.append(f"{origin}: {problem}")
        elif target in entries:
            draft.problems.append(f"{origin}: the same setting is given as {entries[target].origin}")
        else:
            entries[target] = Entry(target, value, origin)
    return list(entries.values())


def _known_tables(aliases: Mapping[Path, Path]) -> Tables:
    tables: dict[str, tuple[str, ...]] = {}
    for path in aliases:
        table = dotted(path[:-1])
        tables[table] = (*tables.get(table, ()), str(path[-1]))
    return tables | native_tables()


def _leaves(value: Any, path: Path, aliases: Mapping[Path, Path]) -> list[tuple[Path, Any]]:
    """Options in order. An empty table is kept, since [engine] alone says something."""
    is_list_of_tables = len(path) == 1 and path[0] in list_tables() and isinstance(value, list)
    if is_list_of_tables and value:
        return [leaf for i, item in enumerate(value) for leaf in _leaves(item, (*path, i), aliases)]
    if isinstance(value, Mapping) and (value or len(path) == 0) and not _is_mapping(path):
        return [leaf for key, item in value.items() for leaf in _leaves(item, (*path, key), aliases)]
    return [(path, value)]


def _is_mapping(path: Path) -> bool:
    """Whether a table is the value of an option, such as `params` of a target."""
    names = [part for part in path if isinstance(part, str)]
    if len(names) != 2 or names[1] not in native_tables().get(names[0], ()):
        return False
    return is_mapping(names[0], names[1])


def _unknown(path: Path, value: Any, tables: Tables) -> str | None:
    """What is wrong with a name, or None if it is an option."""
    table = str(path[0])
    if table not in native_tables() or (isinstance(value, Mapping) and len(path) == 1):
        return _unknown_table(path, value, tables)
    if len(path) == 1:
        form = f"[[{table}]]" if table in list_tables() else f"[{table}]"
        return None if table in list_tables() and value == [] else f"must be a table, written {form}"
    if table in list_tables():
        path = (table, *path[2:]) if isinstance(path[1], int) else path[:1]
        if len(path) == 1:
            return f"must be a list of tables, each written [[{table}]]"
    if len(path) == 2 and path[1] in tables[table]:
        return None
    wrong = str(path[1])
    if len(path) > 2 and wrong in tables[table]:
        return "is an option, not a table"
    return f"unknown setting in [{table}]; {suggestion(table, wrong, tables)}"


def _unknown_table(path: Path, value: Any, tables: Tables) -> str | None:
    table = dotted(path[:-1]) or str(path[0])
    if isinstance(value, Mapping):  # empty
        return None if dotted(path) in tables else f"unknown table; {suggestion('', str(path[-1]), _as_names(tables))}"
    if len(path) == 1:
        if table in tables:
            return f"must be a table, written [{table}]"
        return f"unknown setting outside any table; {suggestion('', str(path[0]), tables)}"
    if table in tables:
        return f"unknown setting in [{table}]; {suggestion(table, str(path[-1]), tables)}"
    hint = suggestion("", str(path[0]), _as_names(tables))
    home = suggestion("", str(path[-1]), tables)
    return f"unknown table [{table}]; {home if home.startswith('it belongs') else hint}"


def _as_names(tables: Tables) -> Tables:
    return {"": tuple(tables)}


def _line_of(path: Path, lines: Mapping[Path, int]) -> int | None:
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None
