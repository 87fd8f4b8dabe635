"""The comparison for machines: one JSON object with every raw row, or CSV with one row per request. Pure."""

from __future__ import annotations

import csv
import hashlib
import io
from typing import Any

import msgspec

from backends.protocol.messages import Timings
from gateway.bench.header import client_version
from gateway.bench.options import CompareOptions
from gateway.bench.rows import Comparison, RequestRow
from gateway.bench.summary import Summary

TIMING_COLUMNS = (
    "queue_seconds",
    "prefill_seconds",
    "transfer_seconds",
    "transfer_overlapped_seconds",
    "transfer_bytes",
    "decode_wait_seconds",
    "decode_seconds",
    "num_preemptions",
)
ROW_COLUMNS = tuple(name for name in RequestRow.__struct_fields__ if name not in {"text", "timings"})
COLUMNS = (*ROW_COLUMNS, "text_sha256", *TIMING_COLUMNS)


def to_json(comparison: Comparison, summary: Summary, options: CompareOptions, url: str) -> str:
    """Everything: what was asked, the figures, the raw rows. The key isn't among it."""
    document = {
        "url": url,
        "client_version": client_version(),
        "options": options,
        "summary": summary,
        "comparison": {**_plain(comparison), "passes": [_pass(one) for one in comparison.passes]},
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def to_csv(comparison: Comparison) -> str:
    """One line per measured request; empty where nobody knows the value."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for one in comparison.passes:
        writer.writerows(csv_row(row) for row in one.rows)
    return text.getvalue()


def csv_row(row: RequestRow) -> dict[str, object]:
    values: dict[str, object] = {name: getattr(row, name) for name in ROW_COLUMNS}
    values["text_sha256"] = hashlib.sha256(row.text.encode()).hexdigest()
    if row.timings is not None:
        values |= {name: getattr(row.timings, name) for name in TIMING_COLUMNS}
    return values


def _pass(one: msgspec.Struct) -> dict[str, Any]:
    plain = _plain(one)
    return {**plain, "rows": [{**_plain(row), "timings": _timings(row.timings)} for row in plain["rows"]]}


def _timings(timings: Timings | None) -> dict[str, Any] | None:
    """With the phases that were 0, which the protocol leaves out."""
    return None if timings is None else _plain(timings)


def _plain(value: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__struct_fields__}
