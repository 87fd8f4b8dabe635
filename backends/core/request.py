"""One request inside an engine, from admission to its last token. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from backends.protocol.messages import CacheParams, SamplingParams, TokenScore

if TYPE_CHECKING:
    from backends.core.block_pool import KVCacheBlock


class TokenGrammar(Protocol):
    """Which tokens may come next in one answer. Follows its tokens by itself, whatever else happens to them."""

    def allowed(self, output_token_ids: Sequence[int]) -> bytes:
        """Bit `i % 8` of byte `i // 8` says whether token i may come next; at least one may. Never raises."""

    def is_complete(self, output_token_ids: Sequence[int]) -> bool:
        """Nothing may follow. Raises an exception of its own if the grammar could not be followed any further."""

    def fresh(self) -> TokenGrammar:
        """The same grammar at its start, for another answer."""


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt as a client is shown it, and where in it each of its tokens begins, if that is asked for."""

    text: str
    offsets: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class AnswerText:
    """What an answer's text has beside its tokens' own."""

    opening: str = ""  # what the prompt began it with
    marks: Mapping[int, str] = field(default_factory=dict)  # special tokens that are text here


@dataclass(slots=True, eq=False)
class Request:
    """A request and its progress.

    The server fills the first part; `max_tokens` is already clamped to the context. The scheduler owns the second.
    Invariant: `num_computed_tokens <= num_tokens`, and blocks cover at least the computed tokens.
    """

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    eos_token_ids: frozenset[int]
    sampling: SamplingParams
    cache: CacheParams
    seed: int
    arrived_at: float  # monotonic
    deadline_at: float | None = None
    notices: tuple[str, ...] = ()
    grammar: TokenGrammar | None = None
    echo: Echo | None = None
    answer_text: AnswerText = AnswerText()

    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None  # prefix hits at first admission; None until then
    blocks: list[KVCacheBlock] = field(default_factory=list)
    num_preemptions: int = 0
    first_scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    output_scores: list[TokenScore] = field(default_factory=list)  # of each output token, where asked for
    prompt_scores: list[TokenScore] = field(default_factory=list)  # of prompt tokens from the second on, where asked
    takes_likeliest: bool = field(init=False)  # the next token is the likeliest, whatever came before, and no more

    def __post_init__(self) -> None:
        self.takes_likeliest = _takes_likeliest(self)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens whose KV isn't computed yet; at least 1 while the request runs."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def reads_prefix_cache(self) -> bool:
        """Tokens that are found computed have no logits left to score the prompt by."""
        return self.sampling.prompt_logprobs is None


def _takes_likeliest(request: Request) -> bool:
    params = request.sampling
    changes = params.logit_bias or params.min_tokens or params.presence_penalty or params.frequency_penalty
    return (
        params.temperature == 0
        and not changes
        and params.repetition_penalty == 1
        and params.logprobs is None
        and request.grammar is None
    )
