"""Base URLs of upstreams: one way to normalise them and one way to join a path to them. Pure."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from urllib.parse import SplitResult, urlsplit

from gateway.settings.errors import SettingsError

_ENDPOINT = re.compile(
    r"/chat/completions$"
    # Without a version before it such a word may well be part of a base, as in https://host/models.
    r"|(?:(?<=/v\d)|(?<=/v1beta)|(?<=/openai))"
    r"/(?:completions|responses(?:/compact)?|messages(?:/count_tokens)?|embeddings|models)$",
    re.I,
)
_DOUBLED_VERSION = re.compile(r"(/v\d+(?:(?:alpha|beta)\d*)?)(?:\1)+$")
_COMPLETE = re.compile(r"/(?:v\d+(?:(?:alpha|beta)\d*)?|openai)$", re.I)
_INNER = re.compile(r"[\s\x00-\x1f\x7f]")


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Whether a name of a URL leads to this host itself. Cached: it's asked of every request."""
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def normalise_base_url(text: str, setting: str = "base_url") -> tuple[str, tuple[str, ...]]:
    """The URL in its one form, and a notice for each thing that was changed. No notice or error repeats a query."""
    trimmed = text.strip()
    parts = _split(trimmed, setting)
    notices: list[str] = []
    if trimmed != text:
        notices.append(f"{setting}: blanks around the URL were removed")
    if parts.query or parts.fragment or trimmed.endswith(("?", "#")):
        notices.append(f"{setting}: the query string was removed; a base URL has none")
    path = _tidy_path(parts.path, setting, notices)
    return f"{parts.scheme.lower()}://{_authority(parts)}{path}", tuple(notices)


def join_url(base: str, path: str) -> str:
    """A normalised base URL and an API path, with or without /v1, as one URL.

    A base that ends in a version (/v1, /v4, /v1beta) or in /openai is used as it is; any other gets /v1.
    """
    rest = "/" + path.lstrip("/")
    if rest == "/v1" or rest.startswith("/v1/"):
        rest = rest[len("/v1") :]
    return f"{base}{rest}" if _COMPLETE.search(base) else f"{base}/v1{rest}"


def _split(url: str, setting: str) -> SplitResult:
    if _INNER.search(url):
        raise SettingsError(f"{setting}: the URL has a blank or a control character inside")
    try:
        parts = urlsplit(url)
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError:
        raise SettingsError(f"{setting}: the URL's host or port is not valid") from None
    if parts.scheme.lower() not in {"http", "https"} or "://" not in url:
        raise SettingsError(f"{setting}: the URL must start with http:// or https://, such as https://taotoken.net/api")
    if not parts.hostname or not port_is_valid:
        raise SettingsError(f"{setting}: the URL's host or port is not valid")
    if parts.username is not None or parts.password is not None:
        raise SettingsError(f"{setting}: the URL must not hold a user name or password; keys go in api_key")
    return parts


def _authority(parts: SplitResult) -> str:
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return host if parts.port is None else f"{host}:{parts.port}"


def _tidy_path(path: str, setting: str, notices: list[str]) -> str:
    tidy = re.sub(r"/{2,}", "/", path).rstrip("/")
    if path not in {tidy, "/"}:
        notices.append(f"{setting}: superfluous slashes were removed")
    without_endpoint = _ENDPOINT.sub("", tidy)
    if without_endpoint != tidy:
        notices.append(f"{setting}: {tidy[len(without_endpoint) :]} was removed; a base URL ends before it")
    once = _DOUBLED_VERSION.sub(r"\1", without_endpoint)
    if once != without_endpoint:
        notices.append(f"{setting}: the version was written twice and is used once")
    return once
