"""Which requests are sent, in which order of modes. Pure and seeded: the same options give the same bytes.

Prompts are lists of token ids, so their length is exact without a tokenizer here. A round has its own prompts, the
same in every mode; no two requests of a comparison share a prompt, so nothing is a prefix hit unless it was primed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gateway.bench.options import CompareOptions
from gateway.core.types import CacheMode

# Ordinary words in the vocabularies of the families served here: special tokens sit at the ends.
FIRST_TOKEN_ID, END_TOKEN_ID = 1000, 9000

WARM_UP_INDEX = -1


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a round; `body` is the JSON that is sent, the same in every mode."""

    round_index: int
    index: int
    body: bytes


def token_id_range(vocab_size: int | None) -> range:
    """Ids that are safe to send. A vocabulary too small for the usual range gives its upper half."""
    if vocab_size is None or vocab_size > FIRST_TOKEN_ID * 2:
        return range(FIRST_TOKEN_ID, min(END_TOKEN_ID, vocab_size or END_TOKEN_ID))
    return range(vocab_size // 2, max(vocab_size, 1))


def token_prompt(options: CompareOptions, round_index: int, index: int, ids: range) -> list[int]:
    """Random ids of exactly the length asked, fixed by seed, round and index."""
    generator = random.Random(f"{options.seed}/{round_index}/{index}")  # a string seeds alike in every process
    return generator.choices(ids, k=options.prompt_tokens)


def text_prompt(options: CompareOptions, round_index: int, index: int) -> str:
    """The text of the file after a first line that no other request has: otherwise the second would be a prefix hit."""
    return f"[{options.seed}/{round_index}/{index}]\n{options.prompt_text}"


def plan_request(options: CompareOptions, model: str, round_index: int, index: int, ids: range) -> PlannedRequest:
    """Greedy, with `ignore_eos`, so every answer has the same length and texts can be compared."""
    prompt: list[int] | str
    if options.prompt_text is None:
        prompt = token_prompt(options, round_index, index, ids)
    else:
        prompt = text_prompt(options, round_index, index)
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": options.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return PlannedRequest(round_index, index, msgspec.json.encode(body))


def plan_round(options: CompareOptions, model: str, round_index: int, ids: range) -> list[PlannedRequest]:
    """The measured requests of one round."""
    return [plan_request(options, model, round_index, index, ids) for index in range(options.num_requests)]


def plan_warm_up(options: CompareOptions, model: str, round_index: int, ids: range) -> PlannedRequest:
    """One request of the same shape that is never measured."""
    return plan_request(options, model, round_index, WARM_UP_INDEX, ids)


def mode_order(modes: Sequence[CacheMode], round_index: int) -> list[CacheMode]:
    """Every other round goes backwards, so a drift of the machine favours neither mode."""
    return list(modes) if round_index % 2 == 0 else list(reversed(modes))
