"""What every engine that takes requests refuses before anything else, and what it says of one it took. Pure."""

from __future__ import annotations

from backends.core.errors import RequestRefused
from backends.core.request import Request
from backends.protocol.messages import Accepted


def check_new(request: Request, *, in_use: bool) -> None:
    """Raise `RequestRefused` for an id that is taken or a prompt without tokens."""
    if in_use:
        raise RequestRefused("invalid_request", f"Request id {request.request_id!r} is in use.", "request_id")
    if not request.prompt_token_ids:
        raise RequestRefused("invalid_request", "The prompt is empty: it must have at least one token.", "prompt")


def accepted(request: Request) -> Accepted:
    return Accepted(
        request_id=request.request_id,
        prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.max_tokens,
        notices=request.notices,
    )
