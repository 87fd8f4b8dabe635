"""Claude Code: the `env` of `~/.claude/settings.json`, which beats the shell's. Checked with 2.1.197."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.clients.client import Api, Client, Environ
from gateway.clients.connection import Connection, number_of, table_of, text_of
from gateway.clients.document import MISSING, Format
from gateway.clients.entries import AnyEntry, Entry, HeaderEntry
from gateway.clients.header_list import split_headers
from gateway.clients.target import MODE_HEADER, TIMEOUT_MILLISECONDS, Target

HEADERS = "ANTHROPIC_CUSTOM_HEADERS"
# Background work uses the haiku slot, plan mode the opus slot: one that is not set asks for a model of Anthropic's.
MODEL_SLOTS = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
)
# With one of these Claude Code sends a second key, or goes elsewhere.
RIVALS = ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY")
_SMALLEST_COMPACT_WINDOW = 100_000  # a lower one is raised to that


def find_file(home: Path, environ: Environ) -> Path:
    named = environ.get("CLAUDE_CONFIG_DIR")
    return (Path(named) if named else home / ".claude") / "settings.json"


def variables(target: Target) -> dict[str, str]:
    """What to set, apart from the headers."""
    wait = str(TIMEOUT_MILLISECONDS)
    found = {"ANTHROPIC_BASE_URL": target.url, "ANTHROPIC_AUTH_TOKEN": target.key}
    found |= dict.fromkeys(MODEL_SLOTS, target.model)
    found |= {
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a changing first line would cost the whole prefix cache
        "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
        "API_TIMEOUT_MS": wait,
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": wait,
    }
    if target.limits:
        found["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(target.limits.output)
        if target.limits.context >= _SMALLEST_COMPACT_WINDOW:
            found["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(target.limits.context)
    return found


def entries(target: Target) -> Sequence[AnyEntry]:
    return (
        *(Entry(("env", name), value) for name, value in variables(target).items()),
        HeaderEntry(("env", HEADERS), MODE_HEADER, str(target.mode) if target.mode else None, "\n"),
        *(Entry(("env", name), MISSING) for name in RIVALS),
        Entry(("apiKeyHelper",), MISSING),
    )


def read_back(plain: Mapping[str, Any], environ: Environ) -> Connection | None:
    """As Claude Code does it: its own `env` over the shell's."""
    env = {**environ, **{str(name): str(value) for name, value in table_of(plain.get("env")).items()}}
    base_url = env.get("ANTHROPIC_BASE_URL", "")
    if not base_url:
        return None
    token, api_key = env.get("ANTHROPIC_AUTH_TOKEN", ""), env.get("ANTHROPIC_API_KEY", "")
    remarks = [f"{name} is set: it decides over the base URL or adds a key" for name in RIVALS[1:] if env.get(name)]
    if token and api_key and token != api_key:
        remarks.append("ANTHROPIC_AUTH_TOKEN and ANTHROPIC_API_KEY are both set and differ: two keys are sent")
    if plain.get("apiKeyHelper"):
        remarks.append("apiKeyHelper is set: its key is sent as well")
    unset = [name for name in MODEL_SLOTS if not env.get(name)]
    if unset:
        remarks.append(f"{', '.join(unset)} not set: such requests ask for a model of Anthropic's")
    return Connection(
        base_url=base_url,
        key=token or api_key,
        key_header="Authorization" if token else "x-api-key",
        model=text_of(env.get("ANTHROPIC_MODEL") or env.get("ANTHROPIC_DEFAULT_SONNET_MODEL")),
        headers=split_headers(env.get(HEADERS, ""), "\n"),
        output=number_of(env.get("CLAUDE_CODE_MAX_OUTPUT_TOKENS")),
        remarks=tuple(remarks),
    )


CLIENT = Client(
    name="claude",
    title="Claude Code",
    api=Api.MESSAGES,
    format=Format.JSON,
    find_file=find_file,
    entries=entries,
    read_back=read_back,
    first_request_tokens=20_000,
    then="run `claude`; one that is open reads it at its next start",
)
