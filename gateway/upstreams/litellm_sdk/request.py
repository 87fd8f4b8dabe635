"""A chat body as arguments of litellm's `acompletion`. Pure; imports nothing of litellm.

Only names in a closed list become arguments: among litellm's others are addresses, keys and test switches, which are
the settings' to say. What a server of OpenAI's own API may understand beyond them goes into its body as it came.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.core.errors import InvalidRequest

# The API's own, that change what is answered: a provider that doesn't take one of them can't answer the request.
_MEANT = frozenset({
    "functions", "function_call", "temperature", "top_p", "n", "stop", "max_tokens", "max_completion_tokens",
    "modalities", "prediction", "audio", "presence_penalty", "frequency_penalty", "logit_bias", "response_format",
    "tools", "tool_choice", "logprobs", "top_logprobs", "reasoning_effort", "thinking", "web_search_options",
})  # fmt: skip
# Those that only advise: left out with a notice where a provider doesn't take them.
_HINTS = frozenset({
    "user", "seed", "parallel_tool_calls", "verbosity", "safety_identifier", "service_tier", "store",
    "prompt_cache_key", "prompt_cache_retention",
})  # fmt: skip
_SAMPLING = frozenset({"top_k", "min_p", "top_a", "repetition_penalty"})  # of no one API, and taken by many
_OURS = frozenset({"model", "messages", "stream", "stream_options"})
_NEUTRAL: dict[str, Any] = {"n": 1, "logprobs": False, "modalities": ["text"], "logit_bias": {}, "functions": []}
_MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class Provider:
    """What litellm says of who serves a model."""

    name: str
    supported: Collection[str] | None  # of the API's fields; None = not known
    passes_any_field: bool  # speaks OpenAI's API: fields that nobody here knows go along


@dataclass(frozen=True, slots=True)
class Arguments:
    values: dict[str, Any]
    notices: tuple[str, ...] = ()


def arguments(fields: Mapping[str, Any], provider: Provider) -> Arguments:
    """Raises InvalidRequest for what can't be asked of this provider."""
    _check(fields)
    said = {name: value for name, value in fields.items() if value is not None and not _is_neutral(name, value)}
    untaken = _untaken(said, provider)
    unknown = [name for name in said if name not in _MEANT | _HINTS | _SAMPLING | _OURS]
    left_out = {*untaken, *unknown}
    values = {name: value for name, value in said.items() if name not in left_out and name not in _OURS}
    values["messages"] = said["messages"]
    notices = _notices(provider, untaken, "is left out, as it has no effect there")
    if provider.passes_any_field and unknown:
        values["extra_body"] = {name: said[name] for name in unknown}
    elif unknown:
        notices += _notices(provider, unknown, "is unknown there and has no effect")
    return Arguments(values, notices)


def _check(fields: Mapping[str, Any]) -> None:
    messages, tools = fields.get("messages"), fields.get("tools")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InvalidRequest("`messages` must be an array of objects.", param="messages")
    if not messages:
        raise InvalidRequest("`messages` must not be empty.", param="messages")
    if "extra_body" in fields:
        reason = "`extra_body` is an option of client libraries, not of the API. Put its fields beside `messages`."
        raise InvalidRequest(reason, param="extra_body")
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict) and tool.get("type") == "mcp":
            raise InvalidRequest("Tools of type `mcp` are not served here.", param="tools")


def _is_neutral(name: str, value: Any) -> bool:
    """Whether the field says what happens anyway: a provider that doesn't know it need not be asked."""
    neutral = _NEUTRAL.get(name)
    return neutral is not None and type(value) is type(neutral) and value == neutral


def _untaken(said: Mapping[str, Any], provider: Provider) -> list[str]:
    """Hints that the provider doesn't take. For anything else that it doesn't take the request is refused."""
    if provider.supported is None:
        return []
    missing = [name for name in said if name in _MEANT | _HINTS and name not in provider.supported]
    refused = [name for name in missing if name in _MEANT]
    if refused:
        names = ", ".join(refused)
        reason = f"Provider {provider.name} does not take {names} for this model. Leave that out, or choose another."
        raise InvalidRequest(reason, param=refused[0])
    return missing


def _notices(provider: Provider, names: list[str], what: str) -> tuple[str, ...]:
    shown = [name for name in names if name.isprintable() and len(name) <= 64][:_MAX_NAMED]
    return (f"provider {provider.name}: {', '.join(shown)} {what}",) if shown else ()
