"""What was measured, raw: one row per request, one pass per mode and round. Values only."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from backends.protocol.messages import Timings
from gateway.core.types import CacheMode

Outcome = Literal["ok", "error", "aborted", "timeout"]


def roles_of(mode: CacheMode) -> tuple[str, ...]:
    """The engine processes a mode uses."""
    return ("merged",) if mode is CacheMode.MERGED else ("prefill", "decode")


class RequestRow(Struct, kw_only=True):
    """One measured request. Only rows with outcome `ok` enter a figure. Instants count from the start of the pass."""

    mode: CacheMode
    round_index: int
    index: int
    outcome: Outcome
    error: str = ""
    http_status: int | None = None
    request_id: str = ""
    intended_at_seconds: float  # when its place in the closed loop became free
    sent_at_seconds: float
    ended_at_seconds: float
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    end_to_end_seconds: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None  # None = nobody said
    num_text_chunks: int = 0
    finish_reason: str | None = None
    text: str = ""
    timings: Timings | None = None  # the gateway's record; None = it had none

    @property
    def is_ok(self) -> bool:
        return self.outcome == "ok"


class Peaks(Struct, kw_only=True, frozen=True):
    """Highest use of one engine process during a pass. None = the gateway doesn't say."""

    memory_bytes: int | None = None
    kv_blocks: int | None = None
    num_blocks: int | None = None  # size of its KV pool


class PassResult(Struct, kw_only=True):
    """All measured requests of one mode in one round."""

    mode: CacheMode
    round_index: int
    rows: list[RequestRow] = []
    wall_seconds: float = 0.0  # first request sent -> last answer ended
    client_cpu_seconds: float = 0.0
    peaks: dict[str, Peaks] = {}  # role -> peaks
    failure: str = ""  # why nothing was measured
    num_not_sent: int = 0  # requests that were planned, and given up because of it


class Process(Struct, kw_only=True, frozen=True):
    """What is known of one engine process."""

    num_threads: int | None = None
    device: str | None = None
    weight_dtype: str | None = None
    kv_cache_dtype: str | None = None
    block_size: int | None = None
    vocab_size: int | None = None
    model_fingerprint: str | None = None


class ServedModel(Struct, kw_only=True, frozen=True):
    """The model that both modes are asked for."""

    id: str
    modes: tuple[str, ...] = ()
    max_model_len: int | None = None
    vocab_size: int | None = None


class Comparison(Struct, kw_only=True):
    """Everything one run measured."""

    model: ServedModel
    passes: list[PassResult] = []
    processes: dict[str, Process] = {}  # role -> what is known of it
    gateway_version: str | None = None
    notices: list[str] = []

    def rows(self, mode: CacheMode) -> list[RequestRow]:
        return [row for one in self.passes if one.mode == mode for row in one.rows]
