"""Logging of the gateway process: to standard error, with every configured secret blotted out."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable

from typing_extensions import override

LEVELS = ("debug", "info", "warning", "error")
_REPEAT_SECONDS = 10.0  # between two lines that say the same
_SHORTEST = 6  # a shorter secret would blot out ordinary words


class RedactingFormatter(logging.Formatter):
    """Formats a record, traceback included, and then replaces secrets."""

    def __init__(self, text: str, secrets: Iterable[str]) -> None:
        super().__init__(text)
        self._secrets: list[str] = []
        self.learn(secrets)

    def learn(self, secrets: Iterable[str]) -> None:
        """From now on these as well; what is known stays a secret."""
        known = {*self._secrets, *(secret for secret in secrets if len(secret) >= _SHORTEST)}
        self._secrets = sorted(known, key=len, reverse=True)

    @override
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


class BadClientFilter(logging.Filter):
    """A client that speaks no proper HTTP gets one line, without what it sent: that may hold its key.

    One that leaves while its answer is written gets none: the record of its request says `client_gone`.
    """

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ConnectionResetError):
            return False
        if error is not None and any(base.__name__ == "HttpProcessingError" for base in type(error).__mro__):
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.msg = f"{record.getMessage()}: it sent no valid HTTP ({type(error).__name__})"
            record.args = record.exc_info = record.exc_text = None
        return True


class NoDescriptorsFilter(logging.Filter):
    """With no file descriptor left, asyncio reports each refused connection with a traceback: one line is enough."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._said_at: float | None = None

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        if not record.getMessage().startswith("socket.accept() out of system resource"):
            return True
        now = self._clock()
        if self._said_at is not None and now < self._said_at + _REPEAT_SECONDS:
            return False
        self._said_at = now
        record.msg = "no file descriptor is left for new connections: they wait. `ulimit -n` shows the limit"
        record.args = record.exc_info = record.exc_text = None
        return True


def learn_secrets(secrets: Iterable[str]) -> None:
    """Of settings that are read while the gateway runs."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, RedactingFormatter):
            handler.formatter.learn(secrets)


def set_up_logging(level: str, secrets: Iterable[str]) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", secrets))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.getLogger("asyncio").addFilter(NoDescriptorsFilter())
    logging.getLogger("aiohttp.server").addFilter(BadClientFilter())
