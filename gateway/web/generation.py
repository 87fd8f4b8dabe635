"""The settings in force and what was made of them, as one whole: a request keeps what it began with.

When settings are read again a new generation takes over for new requests; the old one ends with its last request.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.service import ChatService
from gateway.settings.schema import Settings
from gateway.upstreams.base import PassThroughUpstream
from gateway.upstreams.pd.upstream import PairUpstream


@dataclass(eq=False, slots=True)
class Generation:
    number: int
    settings: Settings
    notices: tuple[str, ...]
    targets: Mapping[str, Target]
    pairs: Mapping[str, PairUpstream]
    service: ChatService
    close: Callable[[], Coroutine[Any, Any, None]]  # of what no other generation uses
    num_requests: int = 0


@dataclass(frozen=True, slots=True)
class ReloadState:
    """For /ready: what is in force, and why the newest settings aren't, if they aren't."""

    generation: int
    loaded_at: float  # seconds since the epoch
    failed_at: float | None = None
    problems: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()  # options whose new values wait for one


class Reloads(Protocol):
    """What can be asked of whatever reads the settings again."""

    @property
    def state(self) -> ReloadState: ...

    def ask(self) -> None:
        """Read them again soon. May be called from a signal handler of the loop."""


class Target(PassThroughUpstream, Protocol):
    """One that the settings name, and the unified upstream."""

    @property
    def kind(self) -> str: ...

    @property
    def reachable(self) -> bool | None:
        """By the last request; None = none yet."""


class InForce:
    """Holds the generation that new requests get. `ended` closes one without requests that is no longer it."""

    def __init__(self, first: Generation, ended: Callable[[Generation], None]) -> None:
        self.current = first
        self._ended = ended

    @contextmanager
    def held(self) -> Iterator[Generation]:
        """The generation of one request, from its start to its end."""
        generation = self.current
        generation.num_requests += 1
        try:
            yield generation
        finally:
            generation.num_requests -= 1
            self._end(generation)

    def replace(self, new: Generation) -> None:
        old, self.current = self.current, new
        self._end(old)

    def _end(self, generation: Generation) -> None:
        if generation is not self.current and generation.num_requests == 0:
            self._ended(generation)
