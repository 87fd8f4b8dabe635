"""The last finished requests: what each asked, got and took. In memory, bounded; no prompt, no answer, no key."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from msgspec import Struct


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
    outcome: str
    status: int | None
    error_code: str | None
    finish_reason: str | None
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
