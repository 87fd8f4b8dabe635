"""Decides how many tokens each request advances in the next step. Knows nothing of models, text or clocks.

There is no prefill phase and no decode phase: every request has tokens not yet computed, and a step lets it catch up
by as many as the token budget allows. Running requests come first, oldest first; then waiting ones, first come first
served.

Why nothing waits for ever: a request takes blocks only from newer ones, so the oldest one always advances; a request
is admitted only when all its tokens fit now; and what could never fit is refused at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from backends.core.errors import RequestRefused, queue_full
from backends.core.kv_cache_manager import KVCacheManager
from backends.core.request import Request
from backends.core.scheduler_types import Reservation, ScheduledRequest, SchedulerOutput
from backends.core.token_budget import TokenBudget


class Scheduler:
    """Which requests run, which wait, and what the next step computes."""

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_batched_tokens: int,
        prefill_chunk_tokens: int,
        prefill_token_ratio: float,
        max_num_seqs: int,
        max_waiting: int,
    ) -> None:
        self._manager = manager
        self._max_batched_tokens = max_batched_tokens
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._prefill_token_ratio = prefill_token_ratio
        self._max_num_seqs = max_num_seqs
        self._max_waiting = max_waiting
        self._running: list[Request] = []  # oldest first
        self._waiting: deque[Request] = deque()  # preempted ones in front
        self._reserved: set[Reservation] = set()
        self._refused_admission: tuple[str, int, int] | None = None
        self._refused_reservation: tuple[str, int, int] | None = None
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # of all requests that were ever admitted

    @property
    def manager(self) -> KVCacheManager:
        return self._manager

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def max_request_tokens(self) -> int:
        """One request's tokens whose KV fits the pool. A request that grew beyond must be finished by its engine."""
        return self._manager.max_request_tokens

    def requests(self) -> Iterator[Request]:
        """All requests, running then waiting."""
        yield from self._running
        yield from self._waiting

    def add(self, request: Request) -> None:
        """Queue a request, or raise `RequestRefused` if it could never run or the queue is full."""
        self.check_fits(request.num_prompt_tokens)
        free_seats = max(0, self._max_num_seqs - len(self._running))  # who takes one at the next step doesn't queue
        if len(self._waiting) >= self._max_waiting + free_seats:
            raise queue_full(len(self._waiting))
        self._waiting.append(request)

    def check_fits(self, num_prompt_tokens: int) -> None:
        """Raise `RequestRefused` for a prompt that can never fit the pool, however long it waits."""
        # One slot more than the prompt: a prompt that fills the pool would leave no room for a single decode step.
        if num_prompt_tokens + 1 > self.max_request_tokens:
            raise RequestRefused(
                "kv_pool_too_small",
                f"The prompt has {num_prompt_tokens} tokens; with one token of answer it can never fit the KV pool "
                f"of {self.max_request_tokens} tokens ({self._manager.pool.num_blocks} blocks of "
                f"{self._manager.block_size}). Shorten the prompt or give the engine a larger KV pool.",
            )

    def reserve(self, request: Request) -> Reservation | None:
        """Blocks for a prompt that is computed elsewhere, or None for now.

        None while anything waits: a preempted request would otherwise see every freed block go to a newcomer. Each
        running request keeps one block to grow into.
        """
        if self._waiting:
            return None
        # Looking a long prefix up again is worth it only once there is more room than when it failed.
        attempt = (request.request_id, self._manager.pool.num_frees, len(self._running))
        if attempt == self._refused_reservation:
            return None
        reservation = self._manager.reserve(request, num_spare_blocks=len(self._running))
        if reservation is None:
            self._refused_reservation = attempt
            return None
        self._reserved.add(reservation)
        return reservation

    def release(self, reservation: Reservation) -> None:
        """Give reserved blocks back unused."""
        self._reserved.remove(reservation)
        self._manager.pool.free(reservation.blocks)

    def add_computed(self, request: Request, reservation: Reservation) -> None:
        """Run a request whose prompt was computed into these reserved blocks and whose first token is known."""
        assert request.num_computed_tokens == request.num_prompt_tokens
        assert request.num_pending_tokens == 1
        self._reserved.remove(reservation)
        self._manager.adopt(request, reservation)
        self.num_prompt_tokens += request.num_prompt_tokens
        self._running.append(request)

    def abort(self, request_id: str) -> Request | None:
        """Forget a request in whatever state and free its blocks. Returns it, or None if it isn't here."""
        request = next((known for known in self.requests() if known.request_id == request_id), None)
        if request is not None:
            self.finish(request)
        return request

    def __contains__(self, request: Request) -> bool:
        return request in self._running or request in self._waiting

    def finish(self, request: Request) -> None:
        """Forget a request that is here and free its blocks; what they hold stays findable."""
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self._manager.free(request)

    def schedule(self) -> SchedulerOutput:
        """What the next step computes; every scheduled request has the blocks for it."""
        budget = self._new_budget()
        preempted: list[Request] = []
        scheduled = self._schedule_running(budget, preempted)
        if not preempted:
            scheduled += self._schedule_waiting(budget)
        return SchedulerOutput(tuple(scheduled), tuple(preempted))

    def update_from_output(self, output: SchedulerOutput, sampled: Sequence[int | None]) -> None:
        """Take in what a step computed: its KV counts now, and sampled tokens become part of their requests."""
        for item, token_id in zip(output.scheduled, sampled, strict=True):
            request = item.request
            request.num_computed_tokens = item.start + item.num_tokens
            self._manager.cache_full_blocks(request, since=item.start)
            if token_id is not None:
                request.output_token_ids.append(token_id)

    def check_integrity(self) -> None:
        """Assert that no block is lost, leaked or owned twice, and that requests keep their invariants."""
        tables = [request.blocks for request in self._running]
        self._manager.pool.check_integrity([*tables, *(reservation.blocks for reservation in self._reserved)])
        for request in self._running:
            num_slots = len(request.blocks) * self._manager.block_size
            assert request.num_computed_tokens <= min(request.num_tokens, num_slots), request
        for request in self._waiting:
            assert not request.blocks, f"{request.request_id} waits with blocks"
            assert request.num_computed_tokens == 0

    def _new_budget(self) -> TokenBudget:
        return TokenBudget.for_step(
            max_batched_tokens=self._max_batched_tokens,
            prefill_chunk_tokens=self._prefill_chunk_tokens,
            prefill_token_ratio=self._prefill_token_ratio,
            least_prompt_tokens=self._manager.block_size,
            num_decoding=sum(_decodes(request) for request in self._running),
        )

    def _schedule_running(self, budget: TokenBudget, preempted: list[Request]) -> list[ScheduledRequest]:
        # Running requests go first: a new prompt never stalls tokens already streaming.
        scheduled: list[ScheduledRequest] = []
        for request in list(self._running):
            if preempted and request not in self._running:
                break  # it and all newer ones were preempted to make room for older ones
            num_tokens = budget.offer(request, decodes=_decodes(request))
            if num_tokens and self._make_room(request, num_tokens, preempted):
                scheduled.append(self._commit(request, num_tokens, budget))
        return scheduled

    def _make_room(self, request: Request, num_tokens: int, preempted: list[Request]) -> bool:
        """Blocks for `num_tokens` more, taken from the newest requests if need be.

        The newest one itself doesn't give way but waits with its blocks: what it computed may still be of use, and
        an older request that needs the room takes it anyway.
        """
        while not self._manager.allocate_slots(request, num_tokens):
            if self._running[-1] is request:
                return False
            preempted.append(self._preempt_newest())
        return True

    def _preempt_newest(self) -> Request:
        victim = self._running.pop()
        self._manager.free(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(victim)
        return victim

    def _schedule_waiting(self, budget: TokenBudget) -> list[ScheduledRequest]:
        scheduled: list[ScheduledRequest] = []
        while self._waiting and len(self._running) < self._max_num_seqs:
            request = self._waiting[0]
            if not budget.offer(request, decodes=False) or not self._admit(request):
                break
            self._running.append(self._waiting.popleft())
            scheduled.append(self._commit(request, budget.offer(request, decodes=False), budget))
        return scheduled

    def _admit(self, request: Request) -> bool:
        """Admit if all its tokens fit now and each running request still has a block to grow into."""
        # Looking a long prefix up again is worth it only once there is more room than when it failed.
        attempt = (request.request_id, self._manager.pool.num_frees, len(self._running))
        if attempt == self._refused_admission:
            return False
        is_first = request.num_cached_tokens is None
        if not self._manager.admit(request, num_spare_blocks=len(self._running)):
            self._refused_admission = attempt
            return False
        if is_first:
            self.num_prompt_tokens += request.num_prompt_tokens
        return True

    def _commit(self, request: Request, num_tokens: int, budget: TokenBudget) -> ScheduledRequest:
        budget.spend(num_tokens, decodes=_decodes(request))
        return ScheduledRequest(request, request.num_computed_tokens, num_tokens)


def _decodes(request: Request) -> bool:
    """Whether it has caught up: all but its last sampled token is computed."""
    return request.num_pending_tokens == 1 and request.num_computed_tokens >= request.num_prompt_tokens
