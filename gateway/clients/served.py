"""Asks a running gateway which models it has. The one place here that opens a connection."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

from gateway.clients.connection import number_of

WAIT_SECONDS = 4.0
MAX_BYTES = 4 * 1024**2


@dataclass(frozen=True, slots=True)
class Served:
    """`problem` says why the list isn't known."""

    models: dict[str, int | None]  # name -> tokens of context, where the gateway knows it
    problem: str = ""

    def first(self) -> str | None:
        """The first that is no spelling with a mode."""
        return next((name for name in self.models if not name.endswith((":merged", ":split"))), None)


def ask(url: str, key: str) -> Served:
    """Straight to that address: through no proxy and after no redirect, since the key goes with it."""
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    try:
        with closing(kind(parts.hostname or "", parts.port, timeout=WAIT_SECONDS)) as connection:
            connection.request("GET", f"{parts.path}/v1/models", headers={"Authorization": f"Bearer {key}"})
            answer = connection.getresponse()
            body = answer.read(MAX_BYTES)
    except (OSError, HTTPException, ValueError):
        return Served({}, f"no gateway answers at {url}")
    if answer.status != 200:
        return Served(
            {}, f"{url} answers HTTP {answer.status}" + (" (is the key right?)" if answer.status == 401 else "")
        )
    return parse(body)


def parse(body: bytes) -> Served:
    try:
        rows = json.loads(body)["data"]
        return Served({str(row["id"]): number_of(row.get("max_model_len")) for row in rows})
    except (ValueError, KeyError, TypeError, AttributeError):
        return Served({}, "what answers there lists no models")
