"""How much is sent to each gateway, and what. Values alone; knows no gateway."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

MODEL = "bench"  # every gateway serves the upstream's one model under this name
WORD = b"word "  # of which the upstream's answers consist
PROMPT = "hello " * 200


class Kind(StrEnum):
    """How an answer comes: in one piece, or as events."""

    PLAIN = "plain"
    STREAM = "stream"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Counts of requests of each kind, unless a name says otherwise."""

    num_chunks: int = 32  # of a streamed answer
    num_warm_ups: int = 30
    num_pairs: int = 400  # each directly and through the gateway
    num_lanes: int = 16  # at once, for requests a second
    num_rounds: int = 5  # of requests a second, each directly and through the gateway
    num_round_requests: int = 400
    num_memory_requests: int = 20_000  # both kinds in turn
    num_memory_points: int = 20
    num_streams: int = 500  # at once
    stream_gap_seconds: float = 0.2  # between chunks of those, so that all are open together


QUICK = Sizes(
    num_warm_ups=3,
    num_pairs=10,
    num_lanes=4,
    num_rounds=2,
    num_round_requests=16,
    num_memory_requests=100,
    num_memory_points=10,
    num_streams=20,
    stream_gap_seconds=0.02,
)


def request_body(kind: Kind) -> bytes:
    """The same for every gateway and for the upstream itself."""
    return msgspec.json.encode(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 64,
            "stream": kind is Kind.STREAM,
        }
    )
