"""One request inside an engine, from admission to its last token. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backends.protocol.messages import CacheParams, SamplingParams

if TYPE_CHECKING:
    from backends.core.block_pool import KVCacheBlock


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

    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None  # prefix hits at first admission; None until then
    blocks: list[KVCacheBlock] = field(default_factory=list)
    num_preemptions: int = 0
    first_scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

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
