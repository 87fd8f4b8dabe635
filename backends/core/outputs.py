"""When an answer is over, judged by its tokens. Pure; knows nothing of text: stop strings are the detokenizer's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from backends.core.request import Request


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an answer ended. `hides_token`: its last token is a mark, not text."""

    reason: Literal["stop", "length"]
    stop_reason: str | int | None = None
    hides_token: bool = False


LENGTH = Ending("length")


def ending_by_stop_token(request: Request) -> Ending | None:
    """Whether the newest token stops the answer: one of the request's stop tokens, or the model's end of text.

    Before `min_tokens` neither stops it. A stop token that was asked for counts even with `ignore_eos`. A grammar
    ends its answer itself: an end of text comes only where it allows one, and stop tokens have no effect.
    """
    token_id = request.output_token_ids[-1]
    if request.grammar is not None:
        return Ending("stop", hides_token=True) if token_id in request.eos_token_ids else None
    if len(request.output_token_ids) < request.sampling.min_tokens:
        return None
    if token_id in request.sampling.stop_token_ids:
        return Ending("stop", token_id, hides_token=True)
    if token_id in request.eos_token_ids and not request.sampling.ignore_eos:
        return Ending("stop", hides_token=True)
    return None


def ending_by_length(request: Request, max_num_tokens: int) -> Ending | None:
    """Whether there is no room for another token: `max_tokens` is reached, or the KV pool can't hold one more.

    The newest token's KV isn't computed yet, so a request of `max_num_tokens` still fits and one more token doesn't.
    """
    full = len(request.output_token_ids) >= request.max_tokens or request.num_tokens > max_num_tokens
    return LENGTH if full else None
