"""Logging of the gateway process: to standard error, with every configured secret blotted out."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable

from typing_extensions import override

LEVELS = ("debug", "info", "warning", "error")
_SHORTEST = 6  # a shorter secret would blot out ordinary words


class RedactingFormatter(logging.Formatter):
    """Formats a record, traceback included, and then replaces secrets."""

    def __init__(self, text: str, secrets: Iterable[str]) -> None:
        super().__init__(text)
        self._secrets = sorted({secret for secret in secrets if len(secret) >= _SHORTEST}, key=len, reverse=True)

    @override
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def set_up_logging(level: str, secrets: Iterable[str]) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", secrets))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
