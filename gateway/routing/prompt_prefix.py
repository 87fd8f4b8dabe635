"""A prompt as a chain of prefixes, without a tokenizer: which prompts begin alike, and for how long. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from backends.protocol.messages import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from gateway.core.types import ChatRequest

PIECE_CHARACTERS = 512
MAX_PIECES = 2048  # of the longest prompts only the beginning is compared: a million characters
CHARACTERS_PER_TOKEN = 4  # for prompts that come as token ids


@dataclass(frozen=True, slots=True)
class Prefix:
    """A beginning of a prompt: equal keys mean equal beginnings."""

    key: int
    num_characters: int


def prefix_chain(request: ChatRequest) -> list[Prefix]:
    """The beginnings of a prompt, from the shortest to the whole.

    Each message begins a piece, so that a conversation's next turn has all prefixes of the one before.
    """
    chain: list[Prefix] = []
    key, num_characters = hash((request.model, request.strategy.cache_salt, type(request.prompt).__name__)), 0
    for piece in _pieces(request.prompt):
        key, num_characters = hash((key, piece)), num_characters + _length(piece)
        chain.append(Prefix(key, num_characters))
        if len(chain) == MAX_PIECES:
            break
    return chain


def num_characters(prompt: Prompt) -> int:
    """How long a prompt is, roughly: what computing it is measured by."""
    match prompt:
        case TokenPrompt(token_ids=token_ids):
            return len(token_ids) * CHARACTERS_PER_TOKEN
        case TextPrompt(text=text):
            return len(text)
        case ChatPrompt(messages=messages, tools=tools):
            tool_characters = len(msgspec.json.encode(tools)) if tools else 0
            return tool_characters + sum(len(str(message.get("content") or "")) for message in messages)


Piece = str | bytes | tuple[int, ...]


def _pieces(prompt: Prompt) -> Iterator[Piece]:
    match prompt:
        case TokenPrompt(token_ids=token_ids):
            size = PIECE_CHARACTERS // CHARACTERS_PER_TOKEN
            yield from (tuple(token_ids[start : start + size]) for start in range(0, len(token_ids), size))
        case TextPrompt(text=text):
            yield from (text[start : start + PIECE_CHARACTERS] for start in range(0, len(text), PIECE_CHARACTERS))
        case ChatPrompt(messages=messages, tools=tools, template_kwargs=options):
            for part in (*filter(None, (tools, options)), *messages):
                data = msgspec.json.encode(part)
                yield from (data[start : start + PIECE_CHARACTERS] for start in range(0, len(data), PIECE_CHARACTERS))


def _length(piece: Piece) -> int:
    return len(piece) * CHARACTERS_PER_TOKEN if isinstance(piece, tuple) else len(piece)
