"""The last finished requests: what each asked, got and took. In memory, bounded; no prompt, no answer, no key."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import Any

from msgspec import Struct


class AttemptRecord(Struct, frozen=True):
    """One try of a request at one target."""

    backend: str
    cache_mode: str | None  # asked of it
    outcome: str  # ok, client_gone, or why it failed
    seconds: float


class Record(Struct, frozen=True, kw_only=True):
    """One finished request. `timings` holds seconds, counts and bytes by their names."""

    request_id: str
    client_request_id: str | None
    started_at: float  # seconds since the epoch
    dialect: str
    model: str | None
    stream: bool
    key_name: str | None
    backend: str | None
    upstream_model: str | None
    cache_mode: str | None  # that served
    cache_mode_requested: str | None
    cache_mode_source: str | None
    cache_mode_reason: str | None
    cache_variant: str | None = None  # KV dtype of the engine variant that served; None = the main engine
    instance: str | None = None  # of the bundled engine
    instance_reason: str | None = None  # why it was chosen among several
    attempts: tuple[AttemptRecord, ...] = ()  # the last one is the answer's
    outcome: str
    status: int | None
    error_code: str | None
    finish_reason: str | None
    cost_usd: float | None = None  # None = not known
    notices: tuple[str, ...]
    timings: dict[str, Any]


class RecordStore:
    """Keeps the newest `max_records`; the oldest goes first."""

    def __init__(self, max_records: int) -> None:
        self._max_records = max_records
        self._records: OrderedDict[str, Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Record) -> None:
        if self._max_records == 0:
            return
        self._records[record.request_id] = record
        while len(self._records) > self._max_records:
            self._records.popitem(last=False)

    def get(self, request_id: str) -> Record | None:
        return self._records.get(request_id)

    def newest(self, limit: int) -> list[Record]:
        """The last finished requests, newest first."""
        return list(islice(reversed(self._records.values()), limit))
