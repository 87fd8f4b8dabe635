"""Which of several alike instances takes a request: who knows its beginning, unless that one has too much to do. Pure.

The cost of an instance is its outstanding work less what it saves, both in characters of prompts. Work is every prompt
that has no token yet, and `RUNNING_CHARACTERS` for each running request. Saved is as much of the prompt as a request
before it had in common, at least `SESSION_CHARACTERS` where the session's last turn was. So affinity is given up as
soon as another instance has less to do by more than it would save.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.core.types import ChatRequest, InstanceId
from gateway.routing.prompt_prefix import Prefix, num_characters, prefix_chain

RUNNING_CHARACTERS = 1000
SESSION_CHARACTERS = 8000
MAX_PREFIXES = 16_384
MAX_SESSIONS = 4096
MAX_HOLDERS = 8  # instances remembered for one prefix


@dataclass(slots=True)
class _Load:
    num_running: int = 0
    prompt_characters: int = 0  # of requests without a token yet
    last_chosen: int = 0

    @property
    def work(self) -> int:
        return self.prompt_characters + RUNNING_CHARACTERS * self.num_running


@dataclass(slots=True)
class Assignment:
    """A request at its instance. Tell it of the first token and, in any case, of the end."""

    instance: InstanceId
    reason: str
    _load: _Load
    _prompt_characters: int
    _is_over: bool = field(default=False)

    def first_token(self) -> None:
        """The prompt is computed; from now on the request costs what a running one does."""
        self._load.prompt_characters -= self._prompt_characters
        self._prompt_characters = 0

    def done(self) -> None:
        if not self._is_over:
            self._is_over = True
            self.first_token()
            self._load.num_running -= 1


class InstanceChoice:
    """Remembers who computed what, and who is at work on what. Bounded: the least recently used is forgotten."""

    def __init__(self, *, max_prefixes: int = MAX_PREFIXES, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_prefixes = max_prefixes
        self._max_sessions = max_sessions
        self._holders: OrderedDict[int, tuple[InstanceId, ...]] = OrderedDict()
        self._sessions: OrderedDict[int, InstanceId] = OrderedDict()  # by hash: a client's key may be long
        self._loads: dict[InstanceId, _Load] = {}
        self._names: set[str] = set()
        self._count = itertools.count(1)

    def choose(self, instances: Sequence[InstanceId], request: ChatRequest) -> Assignment:
        """One of `instances`, of which there must be one. The request counts as its load until `done`."""
        self._forget_processes(instances)
        if len(self._names) == 1:
            return self._assign(instances[0], "only instance", request)
        chain = prefix_chain(request) if request.strategy.enable_prefix_cache else []
        known = {instance: self._known_characters(instance, chain) for instance in instances}
        home = self._sessions.get(hash(request.session)) if request.session else None
        chosen = min(instances, key=lambda instance: self._cost(instance, known[instance], is_home=instance == home))
        self._remember(chosen, chain, request.session)
        return self._assign(chosen, _reason(known[chosen], chain, is_home=chosen == home), request)

    def _cost(self, instance: InstanceId, known: int, *, is_home: bool) -> tuple[int, int, int]:
        """Of equally dear ones the least busy, then the one that was idle for longest."""
        load = self._loads[instance]
        saved = max(known, SESSION_CHARACTERS) if is_home else known
        return load.work - saved, load.num_running, load.last_chosen

    def _assign(self, instance: InstanceId, reason: str, request: ChatRequest) -> Assignment:
        load, characters = self._loads[instance], num_characters(request.prompt)
        load.num_running += 1
        load.prompt_characters += characters
        load.last_chosen = next(self._count)
        return Assignment(instance, reason, load, characters)

    def _forget_processes(self, instances: Sequence[InstanceId]) -> None:
        """Loads of processes that are gone; requests that still count there keep their own hold on them."""
        current = set(instances)
        self._loads = {one: load for one, load in self._loads.items() if one in current or load.num_running > 0}
        for instance in instances:
            self._loads.setdefault(instance, _Load())
            self._names.add(instance[0])

    # ---------------------------------------------------------------------------------------------------- who knows

    def _known_characters(self, instance: InstanceId, chain: Sequence[Prefix]) -> int:
        for prefix in reversed(chain):
            if instance in self._holders.get(prefix.key, ()):
                return prefix.num_characters
        return 0

    def _remember(self, instance: InstanceId, chain: Sequence[Prefix], session: str | None) -> None:
        for prefix in reversed(chain):  # the shortest last: many prompts share it, so it is forgotten last
            others = [holder for holder in self._holders.pop(prefix.key, ()) if holder != instance]
            self._holders[prefix.key] = (instance, *others[: MAX_HOLDERS - 1])
        while len(self._holders) > self._max_prefixes:
            self._holders.popitem(last=False)
        if session:
            self._sessions[hash(session)] = instance
            self._sessions.move_to_end(hash(session))
            if len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)


def _reason(known: int, chain: Sequence[Prefix], *, is_home: bool) -> str:
    prefix = f"prefix: {known} of {chain[-1].num_characters} characters known" if known else ""
    if is_home:
        return f"session; {prefix}" if prefix else "session"
    return prefix or "least loaded"
