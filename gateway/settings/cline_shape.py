"""Settings in the shape of an editor's settings.json: `cline.*` keys, flat or nested. Text in, entries out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.core.commented_json import CommentedJsonError, Node, line_at, parse_object
from gateway.settings.entries import Draft, Entry, Origin, Path
from gateway.settings.errors import SettingsError
from gateway.settings.options import nearest_or_all

PREFIX = "cline."
PROVIDER = "apiProvider"
PROVIDERS = ("openai-compatible", "openai")

NAMES: dict[str, Path] = {
    "openAiBaseUrl": ("server", "api_base"),
    "openAiApiKey": ("server", "api_key"),
    "openAiModelId": ("server", "model"),
    "requestOptions.temperature": ("request", "temperature"),
    "requestOptions.maxTokens": ("request", "max_tokens"),
    "requestOptions.stream": ("request", "stream"),
    "requestOptions.timeoutSeconds": ("request", "timeout_seconds"),
    "cacheStrategy": ("cache_layout", "mode"),
    "cacheStrategy.mode": ("cache_layout", "mode"),
    "cacheStrategy.chunkSize": ("cache_layout", "chunk_size"),
    "cacheStrategy.kvCacheDtype": ("kv_cache", "kv_cache_dtype"),
    "cacheStrategy.enablePrefixCache": ("cache_layout", "enable_prefix_cache"),
    "cacheStrategy.prefillEndpoint": ("cache_layout", "prefill_endpoint"),
    "cacheStrategy.decodeEndpoint": ("cache_layout", "decode_endpoint"),
    "cacheStrategy.kvTransferProtocol": ("transfer", "kv_transfer_mode"),
    "cacheStrategy.maxTransferConcurrency": ("transfer", "max_transfer_concurrency"),
}


def looks_like_json(text: str) -> bool:
    """No TOML file begins like this, not even with a comment."""
    return text.lstrip().startswith(("{", "//", "/*"))


def read_json(text: str, source: str, draft: Draft) -> list[Entry]:
    """Entries of the `cline.*` keys; other keys of the editor are none of our business."""
    try:
        root = parse_object(text)
    except CommentedJsonError as error:
        raise SettingsError(f"{source}, line {error.line}: not valid JSON: {error}") from None
    entries: dict[Path, Entry] = {}
    found = False
    for name, value, position in _flat(root, ""):
        if not name.startswith(PREFIX):
            continue
        found = True
        _add(name, value, Origin(name, source, line_at(text, position)), entries, draft)
    if not found:
        raise SettingsError(f"{source}: has no cline.* settings; of JSON files only such a settings.json is read")
    return list(entries.values())


def _add(name: str, value: Any, origin: Origin, entries: dict[Path, Entry], draft: Draft) -> None:
    short = name.removeprefix(PREFIX)
    if isinstance(value, dict):  # empty: _flat went into every other
        known_object = short in {"requestOptions", "cacheStrategy"}
        if not known_object:
            draft.problems.append(f"{origin}: unknown setting; {_nearest(short)}")
        return
    if short == PROVIDER:
        if value not in PROVIDERS:
            draft.problems.append(f"{origin}: must be {' or '.join(PROVIDERS)}")
        return
    path = NAMES.get(short)
    if path is None:
        draft.problems.append(f"{origin}: unknown setting; {_nearest(short)}")
    elif path in entries:
        draft.problems.append(f"{origin}: the same setting is given as {entries[path].origin}")
    elif value is not None:  # null is how an editor writes "not set"
        entries[path] = Entry(path, value, origin)


def _flat(node: Node, prefix: str) -> Iterator[tuple[str, Any, int]]:
    """Dotted name, value and place of every member, doubled ones included."""
    for member in node.members:
        name = f"{prefix}{member.name}"
        if member.node.members:
            yield from _flat(member.node, f"{name}.")
        else:
            yield name, member.node.value, member.start


def _nearest(short: str) -> str:
    return nearest_or_all(PREFIX + short, [PREFIX + name for name in (PROVIDER, *NAMES)])
