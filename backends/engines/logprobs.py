"""From scores of token ids to logprobs for clients. Pure; knows no request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from backends.protocol.messages import TokenLogprob, TokenScore

# A token as text and as bytes; no bytes for special tokens.
Spell = Callable[[int], tuple[str, bytes | None]]


def token_logprob(score: TokenScore, offset: int, spell: Spell) -> TokenLogprob:
    top = [TokenLogprob(*spell(token_id), logprob, offset) for token_id, logprob in score.top]
    return TokenLogprob(*spell(score.token_id), score.logprob, offset, top)


def prompt_logprobs(
    token_ids: Sequence[int], scores: Sequence[TokenScore], offsets: Sequence[int], spell: Spell
) -> list[TokenLogprob]:
    """`scores` are of all tokens but the first, before which there is nothing to tell how likely it was."""
    first = TokenLogprob(*spell(token_ids[0]), None, offsets[0])
    rest = zip(scores, offsets[1:], strict=True)
    return [first, *(token_logprob(score, offset, spell) for score, offset in rest)]
