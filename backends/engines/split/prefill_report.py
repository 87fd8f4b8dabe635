"""What was reserved for each request and what the prefill side said of it, kept to complete its timings. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from backends.core.request import Request
from backends.protocol.messages import Prefilled, Timings


@dataclass(frozen=True, slots=True)
class _Reserved:
    at: float
    num_held_tokens: int


@dataclass(slots=True)
class _Report:
    prefilled: Prefilled
    received_at: float
    decode_started_at: float | None = None
    first_step_seconds: float = 0.0


class PrefillReports:
    """One report per request that decodes. All instants are of one clock: that of this host."""

    def __init__(self) -> None:
        self._reserved: dict[str, _Reserved] = {}
        self._reports: dict[str, _Report] = {}
        self.step_started_at = 0.0  # of the decode step that runs, or of the last one

    def __len__(self) -> int:
        return len(self._reserved)

    def reserved(self, request_id: str, *, at: float, num_held_tokens: int) -> None:
        """Blocks were taken for it, the first of them with that many tokens' KV in them. The last time counts."""
        self._reserved[request_id] = _Reserved(at, num_held_tokens)

    def add(self, prefilled: Prefilled, *, at: float) -> None:
        self._reports[prefilled.request_id] = _Report(prefilled, at)

    def apply(self, request: Request) -> None:
        """Put the first token and the prompt's progress on the request."""
        prefilled = self._reports[request.request_id].prefilled
        request.output_token_ids.append(prefilled.token_id)
        if prefilled.score is not None:
            request.output_scores.append(prefilled.score)
        if prefilled.prompt_scores:  # another choice of the same prompt has them already
            request.prompt_scores = prefilled.prompt_scores
        request.num_computed_tokens = request.num_prompt_tokens
        request.num_cached_tokens = prefilled.cached_tokens
        request.first_scheduled_at = prefilled.first_scheduled_at
        request.first_token_at = request.last_token_at = prefilled.sampled_at

    def decode_scheduled(self, request_id: str, *, ended_at: float) -> None:
        """The request was part of the last step; only its first one counts."""
        report = self._reports.get(request_id)
        if report is not None and report.decode_started_at is None:
            report.decode_started_at = self.step_started_at
            report.first_step_seconds = ended_at - self.step_started_at

    def forget(self, request_id: str) -> None:
        self._reserved.pop(request_id, None)
        self._reports.pop(request_id, None)

    def complete_timings(self, request: Request, timings: Timings) -> Timings:
        """Add what happened on the prefill side and on the way."""
        report = self._reports.get(request.request_id)
        if report is None:
            return timings
        prefilled, reserved = report.prefilled, self._reserved[request.request_id]
        started_at, step_seconds = report.decode_started_at, report.first_step_seconds
        if started_at is None:  # ended by its first decode step, or before any
            started_at = report.received_at
            if len(request.output_token_ids) > 1 and request.last_token_at is not None:
                started_at, step_seconds = self.step_started_at, request.last_token_at - self.step_started_at
        return msgspec.structs.replace(
            timings,
            slot_wait_seconds=max(reserved.at - request.arrived_at, 0.0),
            prefill_hit_tokens=prefilled.cached_tokens,
            computed_tokens=request.num_prompt_tokens - prefilled.cached_tokens,
            decode_held_tokens=reserved.num_held_tokens,
            transferred_tokens=request.num_prompt_tokens - reserved.num_held_tokens,
            first_decode_step_seconds=step_seconds,
            transfer_seconds=prefilled.transfer_seconds,
            transfer_overlapped_seconds=prefilled.transfer_overlapped_seconds,
            transfer_bytes=prefilled.transfer_bytes,
            decode_wait_seconds=max(started_at - report.received_at, 0.0),
            num_preemptions=timings.num_preemptions + prefilled.num_preemptions,
            peak_kv_blocks={**timings.peak_kv_blocks, "prefill": prefilled.peak_kv_blocks},
            peak_memory_bytes={**timings.peak_memory_bytes, "prefill": prefilled.peak_memory_bytes},
        )
