"""The head of a request in HTTP/1.1. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from yarl import URL


def request_head(method: str, url: URL, headers: Mapping[str, str], length: int | None) -> bytes:
    """With `Host` and the length of the body, and nothing else that isn't in `headers`.

    Raises ValueError for a name or value that would break out of its line. Bytes that came in a client's header and
    are no text go on as they are.
    """
    fields = [f"{name}: {value}\r\n" for name, value in headers.items()]
    text = "".join(fields)
    if not text.count("\r") == text.count("\n") == len(fields) or "\0" in text:
        raise ValueError("a header has a line break or a null in it")
    end = "\r\n" if length is None else f"Content-Length: {length}\r\n\r\n"
    return f"{_start(method, url)}{text}{end}".encode("utf-8", "surrogateescape")


@lru_cache(maxsize=256)
def _start(method: str, url: URL) -> str:
    return f"{method} {url.raw_path_qs} HTTP/1.1\r\nHost: {url.host_port_subcomponent}\r\n"
