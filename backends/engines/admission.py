"""What every engine that takes requests refuses before anything else. Pure."""

from __future__ import annotations

from backends.core.errors import RequestRefused
from backends.core.request import Request


def check_new(request: Request, *, in_use: bool) -> None:
    """Raise `RequestRefused` for an id that is taken or a prompt without tokens."""
    if in_use:
        raise RequestRefused("invalid_request", f"Request id {request.request_id!r} is in use.", "request_id")
    if not request.prompt_token_ids:
        raise RequestRefused("invalid_request", "The prompt is empty: it must have at least one token.", "prompt")
