"""Values in their one spelling: modes, transfer modes, dtypes, chunk sizes, URLs. Works on a draft; knows no files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.core.spelling import (
    ENGINE_KV_DTYPES,
    parse_kv_dtype,
    parse_mode,
    parse_transfer,
    parse_transfer_backend,
    round_chunk_size,
)
from gateway.settings.base_url import normalise_base_url
from gateway.settings.entries import Draft, Path
from gateway.settings.errors import SettingsError
from gateway.settings.options import accepts, is_list

KV_DTYPE: Path = ("kv_cache", "kv_cache_dtype")
_SPELLINGS: dict[tuple[str, str], Callable[[str], str]] = {
    ("cache_layout", "mode"): parse_mode,
    ("keys", "mode"): parse_mode,
    ("keys", "modes"): parse_mode,
    ("engine", "modes"): parse_mode,
    ("transfer", "kv_transfer_mode"): parse_transfer,
    ("transfer", "backend"): parse_transfer_backend,
    KV_DTYPE: parse_kv_dtype,  # type: ignore[dict-item]
}
_URLS = {
    ("server", "api_base"),
    ("targets", "base_url"),
    ("pairs", "prefill"),
    ("pairs", "decode"),
    ("pairs", "merged"),
    ("cache_layout", "prefill_endpoint"),
    ("cache_layout", "decode_endpoint"),
}


def canonicalise(draft: Draft) -> None:
    """Rewrite values in place; what can't be rewritten becomes a problem and leaves the draft."""
    for path, value in list(draft.values.items()):
        if len(path) < 2:
            continue
        option = (str(path[0]), str(path[-1]))
        try:
            draft.values[path] = _canonical(draft, path, option, value)
        except SettingsError as error:
            draft.problems += error.problems
            draft.fail(path)
        except ValueError as error:
            draft.problems.append(f"{draft.origin_of(path)}: {error}{_shown(draft, path, value)}")
            draft.fail(path)


def _shown(draft: Draft, path: Path, value: Any) -> str:
    """The refused text, or list of texts, unless it may be a secret."""
    items = value if isinstance(value, list) else [value]
    is_short = all(isinstance(item, str) and len(item) < 40 for item in items) and len(items) < 5
    return f", not {value!r}" if is_short and path not in draft.expanded else ""


def take_foreign_kv_dtype(draft: Draft) -> str | None:
    """Take out a KV dtype that is known but not one of the bundled engine's."""
    dtype = draft.values.get(KV_DTYPE)
    if not isinstance(dtype, str) or dtype in ENGINE_KV_DTYPES:
        return None
    text = f"{draft.origin_of(KV_DTYPE)}: {dtype}"
    draft.remove(KV_DTYPE)
    return text


def _canonical(draft: Draft, path: Path, option: tuple[str, str], value: Any) -> Any:
    if isinstance(value, bool) and not accepts(*option, bool):
        raise ValueError(f"must not be {str(value).lower()}: it is no switch")
    spell = _SPELLINGS.get(option)
    if spell is not None and isinstance(value, str) and not is_list(*option):
        return str(spell(value))
    if spell is not None and isinstance(value, list):
        return [str(spell(item)) if isinstance(item, str) else item for item in value]
    if option in _URLS and isinstance(value, str):
        url, notices = normalise_base_url(value, draft.origin_of(path))
        draft.notices += notices
        return url
    if option in _URLS and isinstance(value, list):
        urls = [normalise_base_url(str(item), draft.origin_of(path)) for item in value]
        draft.notices += [notice for _, notices in urls for notice in notices]
        return [url for url, _ in urls]
    if option == ("cache_layout", "chunk_size"):
        return _chunk_size(draft, path, value)
    return value


def _chunk_size(draft: Draft, path: Path, value: Any) -> Any:
    try:
        number = int(value)
    except (TypeError, ValueError):
        return value  # the schema says what it must be
    if number != value and not isinstance(value, str):
        return value
    rounded, notices = round_chunk_size(number, str(draft.origins[path].name))
    draft.notices += notices
    return rounded
