"""How long prompts and answers are, and the prompts themselves. Pure and seeded; knows no server."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Counts of tokens, unless a name says otherwise."""

    short_prompt: int = 32
    medium_prompt: int = 1024
    long_prompt: int = 4096
    load_prompt: int = 256
    decode_output: int = 128
    long_decode_output: int = 64
    load_output: int = 64
    num_streams: int = 8  # at once, under load
    num_load_requests: int = 16
    num_stalled_streams: int = 4
    stream_warm_up: int = 8  # of each stream before anything is counted
    stream_quiet: int = 64  # of each stream before the long prompt comes
    stream_output: int = 3000  # more than any server writes while it computes the long prompt
    prefix_tail: int = 16


QUICK = Sizes(
    medium_prompt=128,
    long_prompt=512,
    load_prompt=64,
    decode_output=16,
    long_decode_output=8,
    load_output=8,
    num_load_requests=8,
    stream_warm_up=2,
    stream_quiet=8,
)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of random ids. Different labels share no prefix, so nothing is found in a prefix cache by accident."""

    seed: int
    ids: range

    def make(self, num_tokens: int, *label: object) -> list[int]:
        """The same ids for the same label, on every server."""
        generator = random.Random("/".join(str(part) for part in (self.seed, *label)))
        return generator.choices(self.ids, k=num_tokens)
