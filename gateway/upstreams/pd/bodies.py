"""Request bodies for a prefill and a decode server. Pure; values that stay are the client's own bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.core.errors import InvalidRequest

Fields = dict[str, Any]  # values that nobody had to look at are `msgspec.Raw`

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_LIMITS = ("max_tokens", "max_completion_tokens")
# What a prefill of one token can't do, or does for nothing. Nothing that may change the prompt is among them: tools,
# tool_choice and response_format stay, since both servers must see the same tokens.
_NOT_FOR_PREFILL = (
    "stream_options",
    "min_tokens",
    "min_completion_tokens",
    "n",
    "best_of",
    "use_beam_search",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
)


@dataclass(frozen=True, slots=True)
class Leg:
    """What is sent to one of the two servers."""

    fields: Fields
    stream: bool
    own_headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        return msgspec.json.encode(self.fields)


def split_fields(body: bytes) -> Fields:
    """The fields of a JSON object, undecoded."""
    return dict(_decode_fields(body))


def value(fields: Fields, name: str) -> Any:
    """One value, decoded; None where it is absent."""
    found = fields.get(name)
    if not isinstance(found, msgspec.Raw):
        return found
    try:
        return msgspec.json.decode(found)
    except (msgspec.MsgspecError, RecursionError):
        raise InvalidRequest(f"The value of `{name}` is not valid.", param=name) from None


def prefill_fields(fields: Fields) -> Fields:
    """The same prompt, for an answer of one token in one piece."""
    kept = {name: found for name, found in fields.items() if name not in _NOT_FOR_PREFILL}
    kept |= {"max_tokens": 1, "stream": False}
    if value(fields, "max_completion_tokens") is not None:
        kept["max_completion_tokens"] = 1
    return kept


def asks_one_token(fields: Fields) -> bool:
    """Then the prefill's token is the whole answer. The newer name of the limit wins, as it does at the servers."""
    limits = [limit for name in reversed(_LIMITS) if (limit := value(fields, name)) is not None]
    return bool(limits) and limits[0] == 1 and not isinstance(limits[0], bool)


def batch_size(fields: Fields) -> int | None:
    """How many prompts a text completion asks for at once; None = it has a single one."""
    prompt = value(fields, "prompt") if "prompt" in fields else None
    is_batch = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return len(prompt) if is_batch and isinstance(prompt, list) else None


def refuse_several_answers(fields: Fields, engine: str, *, batches: bool = False) -> None:
    """One transfer of KV serves one answer: more would wait for KV that never comes, or free it too early."""
    for name in ("n", "best_of"):
        count = value(fields, name)
        if isinstance(count, int) and count > 1:
            raise _only_merged(f"`{name}` above 1", name, engine)
    if value(fields, "use_beam_search"):
        raise _only_merged("`use_beam_search`", "use_beam_search", engine)
    size = batch_size(fields)
    if size is not None and size > 1 and not batches:
        raise _only_merged("a list of prompts", "prompt", engine)


def refuse_prompt_logprobs(fields: Fields, engine: str) -> None:
    """The decode server computes no prompt, so it has no logprobs of one."""
    if value(fields, "prompt_logprobs") is not None:
        raise _only_merged("`prompt_logprobs`", "prompt_logprobs", engine)
    if value(fields, "echo") and value(fields, "logprobs") is not None:
        raise _only_merged("`echo` with `logprobs`", "echo", engine)


def _only_merged(what: str, param: str, engine: str) -> InvalidRequest:
    return InvalidRequest(
        f"{what} can't be served in split mode by a pair of {engine} servers; ask for it with X-Cache-Mode: merged.",
        param=param,
    )
