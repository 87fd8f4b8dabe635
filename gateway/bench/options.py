"""What one comparison is asked to do, and how it can fail as a whole. Values only; knows no HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from gateway.core.types import CacheMode


class CompareError(Exception):
    """The comparison can't be made: nothing answers, the key is refused, no model fits. The message says what to do."""


class WrongMode(CompareError):
    """An answer came in another mode than was asked. Figures of the two modes would be a lie, so the run ends."""


class Warmth(StrEnum):
    """State of the prefix caches for the measured requests."""

    COLD = "cold"
    WARM = "warm"


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """`model` None = the first one that serves every mode in `modes`; `prompt_text` takes the place of token ids."""

    model: str | None = None
    modes: tuple[CacheMode, ...] = (CacheMode.MERGED, CacheMode.SPLIT)
    prompt_tokens: int = 512
    output_tokens: int = 64
    num_requests: int = 16
    concurrency: int = 1
    num_rounds: int = 2
    seed: int = 0
    warmth: Warmth = Warmth.COLD
    prompt_text: str | None = None
    timeout_seconds: float = 600.0


STDOUT = "-"


@dataclass(frozen=True, slots=True)
class Job:
    """What to compare, where, and where the results go: a file, `-` for stdout in place of the table, or None."""

    options: CompareOptions
    url: str
    key: str | None = field(default=None, repr=False)
    json_target: str | None = None
    csv_target: str | None = None
