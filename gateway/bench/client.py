"""The gateway over HTTP, from a client's side. Knows paths, headers and JSON shapes; measures nothing.

Whatever the gateway doesn't say comes back as None or empty, never as 0.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from backends.protocol.messages import Timings
from gateway.bench.answer import error_message
from gateway.bench.failures import reason_of
from gateway.bench.instances import peaks_by_role, processes_by_role
from gateway.bench.options import CompareError
from gateway.bench.rows import Peaks, Process, ServedModel
from gateway.core.types import CacheMode

MAX_ERROR_BYTES = 4096
CALL_TIMEOUT = aiohttp.ClientTimeout(total=60)  # of questions besides the measured requests


class Refused(CompareError):
    """The gateway answered something else than success."""

    def __init__(self, path: str, status: int, message: str) -> None:
        super().__init__(f"{path} answered HTTP {status}: {message}")
        self.status = status


class Unreachable(CompareError):
    """Nobody answers, or not in time."""


def normal_url(url: str) -> str:
    """Scheme, host and port alone: paths are chosen here, and the mode goes in a header."""
    parts = urlsplit(url.strip())
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise CompareError("--url must be the gateway's own address, such as http://127.0.0.1:8000")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise CompareError("--url takes no user, password, query or fragment; give the key with --key or KVGATE_KEY")
    if parts.path.rstrip("/") not in {"", "/v1"}:
        raise CompareError(f"--url takes no path but /v1, got {parts.path!r}: compare sends the mode in a header")
    return f"{parts.scheme}://{parts.netloc}"


class GatewayClient:
    """One session with one gateway."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str | None = None) -> None:
        self._session = session
        self._url = normal_url(url)
        self._key = (key or "").strip()

    def without_key(self, text: str) -> str:
        """The text as it may be shown: a server that echoes the key must not get it printed."""
        return text.replace(self._key, "***") if self._key else text

    @asynccontextmanager
    async def completion(self, body: bytes, mode: CacheMode) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """The answer once its headers are there. Leaving early closes the connection, which aborts the request."""
        headers = {**self._headers(), "Content-Type": "application/json", "X-Cache-Mode": mode.value}
        url = f"{self._url}/v1/completions"
        async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
            yield response

    async def refusal(self, response: aiohttp.ClientResponse) -> str:
        """The message of an answer that is no success."""
        body = await response.content.read(MAX_ERROR_BYTES)
        return self.without_key(f"HTTP {response.status}: {refusal_message(body)}")

    async def models(self) -> list[ServedModel]:
        entries = _items(await self._call("GET", "/v1/models"), "data")
        return [served_model(entry) for entry in entries if isinstance(entry, dict) and "id" in entry]

    async def timings(self, request_id: str) -> Timings | None:
        """Where the request's time went, or None if the gateway has no record of it (yet)."""
        try:
            record = await self._call("GET", f"/v1/requests/{request_id}")
        except Refused as refused:
            if refused.status == 404:
                return None
            raise
        return record_timings(record)

    async def peaks(self) -> dict[str, Peaks]:
        """Peaks of every role's processes together since the last reset."""
        answer = await self._call("GET", "/v1/engines")
        stats = _mapping(answer, "engines")
        found = {name: engine_peaks(entry) for name, entry in stats.items() if isinstance(entry, dict)}
        instances = [entry for entry in _items(answer, "instances") if isinstance(entry, dict)]
        return peaks_by_role(found, [str(entry["name"]) for entry in instances if entry.get("name")])

    async def reset_peaks(self, *, clear_prefix_cache: bool) -> None:
        await self._call("POST", "/v1/admin/reset_peaks", {"clear_prefix_cache": clear_prefix_cache})

    async def processes(self) -> dict[str, Process]:
        """Threads, device and data types by role, from /v1/engines or /ready, whichever says them."""
        found: dict[str, Process] = {}
        for path in ("/v1/engines", "/ready"):
            try:
                answer = await self._call("GET", path)
            except Refused:
                continue
            found = find_processes(answer) | found
        return found

    async def version(self) -> str | None:
        for path in ("/health", "/ready"):
            try:
                answer = await self._call("GET", path)
            except Refused:
                continue
            if isinstance(answer, dict) and isinstance(answer.get("version"), str):
                return str(answer["version"])
        return None

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    async def _call(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else msgspec.json.encode(body)
        headers = self._headers() | ({"Content-Type": "application/json"} if data else {})
        try:
            async with self._session.request(
                method, self._url + path, data=data, headers=headers, allow_redirects=False, timeout=CALL_TIMEOUT
            ) as response:
                answer = await response.read()
        except TimeoutError:
            raise Unreachable(f"{path} at {self._url} gave no answer in {CALL_TIMEOUT.total} s") from None
        except aiohttp.ClientError as error:
            why = f"no gateway answers at {self._url}: {reason_of(error)}"
            raise Unreachable(f"{why}. Start one with: kvgate serve; or give its --url") from None
        if response.status != 200:
            raise Refused(path, response.status, self.without_key(refusal_message(answer) + _advice(response.status)))
        try:
            return msgspec.json.decode(answer)
        except msgspec.DecodeError as error:
            raise CompareError(f"{path} didn't answer JSON ({error}); is {self._url} a kvgate gateway?") from None


def _advice(status: int) -> str:
    return " (give the gateway's key with --key or KVGATE_KEY)" if status in {401, 403} else ""


def refusal_message(body: bytes) -> str:
    """The words in an error body of any shape."""
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body[:200].decode("utf-8", "replace").strip() or "no message"
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return error_message(error)


def served_model(entry: Mapping[str, Any]) -> ServedModel:
    """One entry of /v1/models, wherever it keeps what goes beyond the OpenAI shape."""
    merged = {**entry, **_mapping(entry, "kvgate"), **_mapping(entry, "extra")}
    modes = merged.get("modes") or merged.get("cache_modes") or ()
    return ServedModel(
        id=str(entry["id"]),
        modes=tuple(str(mode) for mode in modes),
        max_model_len=_int(merged, "max_model_len"),
        vocab_size=_int(merged, "vocab_size"),
    )


def record_timings(record: object) -> Timings | None:
    """The engine's timings in a record; None where an upstream elsewhere answered, whose phases nobody knows."""
    timings = _mapping(record, "timings")
    if "prefill_seconds" not in timings:
        return None
    try:
        return msgspec.convert(timings, Timings)
    except msgspec.ValidationError:
        return None


def engine_peaks(stats: Mapping[str, Any]) -> Peaks:
    inner = {**stats, **_mapping(stats, "stats")}
    return Peaks(
        memory_bytes=_int(inner, "peak_memory_bytes"),
        kv_blocks=_int(inner, "peak_blocks_in_use"),
        num_blocks=_int(inner, "num_blocks"),
    )


def find_processes(answer: object) -> dict[str, Process]:
    """Every object in the answer that names a role and its threads; those of one role together."""
    return processes_by_role(_processes(answer, ""))


def _processes(answer: object, name: str) -> Iterator[tuple[str, Process]]:
    """`name` is the key of the answer, or of what it is an `info` of."""
    if isinstance(answer, list):
        for i, item in enumerate(answer):
            yield from _processes(item, str(i))
    if not isinstance(answer, dict):
        return
    if "num_threads" in answer:
        fields = {field: answer.get(field) for field in Process.__struct_fields__}
        yield str(answer.get("role", name)), msgspec.convert(fields, Process, strict=False)
        return
    for key, value in answer.items():
        yield from _processes(value, name if key == "info" else str(key))


def _int(mapping: Mapping[str, Any], key: str) -> int | None:
    value = mapping.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _mapping(answer: object, key: str) -> dict[str, Any]:
    value = answer.get(key) if isinstance(answer, dict) else None
    return value if isinstance(value, dict) else {}


def _items(answer: object, key: str | None) -> list[Any]:
    value = answer.get(key) if isinstance(answer, dict) and key else answer
    return value if isinstance(value, list) else []
