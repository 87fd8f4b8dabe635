"""Errors of OpenAI's Responses: fields by this API's names, codes that Codex and the SDKs act on. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec

from gateway.core.errors import InvalidRequest
from gateway.dialects.base import ErrorFacts
from gateway.dialects.responses_messages import Source
from gateway.dialects.responses_tools import ToolTable

_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.content\[(\d+)\])?")
_TOOL = re.compile(r"tools\[(\d+)\]\.function|tools\[(\d+)\]")
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_TRY_AGAIN = re.compile(r"try again in\s*\d", re.IGNORECASE)
_KEPT_CODES = ("context_length_exceeded", "insufficient_quota", "usage_not_included", "invalid_prompt")
DEFAULT_RETRY_SECONDS = 1.0


def restated(error: InvalidRequest, sources: Sequence[Source], table: ToolTable) -> InvalidRequest:
    """What was found wrong in the chat form, said of the request that the client sent."""

    def message(match: re.Match[str]) -> str:
        if int(match[1]) >= len(sources):
            return match[0]
        source = sources[int(match[1])]
        return source.path if match[2] is None else f"{source.path}.{source.key}[{match[2]}]"

    def tool(match: re.Match[str]) -> str:
        paths, index = list(table.paths.values()), int(match[1] or match[2])
        return paths[index] if index < len(paths) else match[0]

    def say(text: str) -> str:
        return _TOOL.sub(tool, _MESSAGE.sub(message, text))

    said = InvalidRequest(_named(say(error.message)), param=None if error.param is None else _param(say(error.param)))
    said.code = error.code
    return said


def _param(param: str) -> str:
    name, dot, rest = param.partition(".")
    return _NAMES.get(name, name) + dot + rest


def _named(text: str) -> str:
    for chat, ours in _NAMES.items():
        text = re.sub(rf"`{chat}(?=[`.])", f"`{ours}", text)
    return text


def refuse_coded(message: str, param: str, code: str) -> NoReturn:
    error = InvalidRequest(message, param=param)
    error.code = code
    raise error


def error_body(facts: ErrorFacts) -> bytes:
    param = None if facts.param is None else _param(facts.param)
    fields = {"message": facts.message, "type": facts.kind, "param": param, "code": facts.code}
    return msgspec.json.encode({"error": fields})


def failure(facts: ErrorFacts) -> dict[str, Any]:
    """`error` of a response that failed. Codex gives up, waits or starts the turn again by its code."""
    code = _code(facts)
    message = facts.message
    if code == "rate_limit_exceeded" and not _TRY_AGAIN.search(message):
        seconds = facts.retry_after_seconds or DEFAULT_RETRY_SECONDS
        message = f"{message.rstrip()} Please try again in {seconds:g}s."
    return {"code": code, "message": message}


def _code(facts: ErrorFacts) -> str:
    if facts.code in _KEPT_CODES:
        return str(facts.code)
    if facts.status == 429 or facts.kind == "rate_limit_error":
        return "rate_limit_exceeded"
    return "invalid_prompt" if facts.kind == "invalid_request_error" and facts.status < 500 else "server_error"
