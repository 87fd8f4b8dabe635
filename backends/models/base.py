"""What a model runner needs of a model, whichever code computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from backends.attention.paged import PagedAttention
from backends.models.spec import ModelSpec


class CausalModel(Protocol):
    """Computes the rows of a step: every request's new tokens, one request after the other."""

    def forward(self, token_ids: Tensor, positions: Tensor, attention: PagedAttention, rows: Tensor) -> Tensor:
        """token_ids and positions [num_rows]; logits [len(rows), vocab_size] of the given rows only."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: CausalModel
    spec: ModelSpec
