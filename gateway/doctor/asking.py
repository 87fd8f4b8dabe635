"""The requests that each client sends: path, headers, and a body of its size and shape. Pure.

The words are filler: what counts is the size of the instructions, the number of tools, and the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from gateway.clients.client import Api
from gateway.clients.connection import Connection
from gateway.doctor.fetch import Ask

QUESTION = "Reply with the single word: pong"
MAX_TOKENS = 16  # a client asks for far more; the check needs an end
_SENTENCE = "Read the file before you change it, keep the answer short, and say what you did. "


@dataclass(frozen=True, slots=True)
class Size:
    """Characters of instructions, number of tools and characters of all tools."""

    instructions: int
    num_tools: int
    tools: int


# As measured on the first request of cline 3.0.65, claude 2.1.197, codex 0.171 and opencode 1.18.33.
SIZES: dict[str, Size] = {
    "cline": Size(4_300, 25, 18_000),
    "claude": Size(12_000, 25, 72_000),
    "codex": Size(18_000, 9, 18_500),
    "opencode": Size(9_700, 10, 21_000),
    "continue": Size(2_000, 8, 6_000),
    "gemini": Size(20_000, 12, 16_000),
}
SMALL = Size(200, 1, 300)
PLAIN = Size(0, 0, 0)


def main_request(name: str, api: Api, connection: Connection, size: Size) -> Ask:
    """A streamed turn with tools."""
    path, headers, body = _BUILDERS[api](connection, size)
    url = connection.base_url.rstrip("/") + path
    if connection.query:
        url += ("&" if "?" in url else "?") + urlencode(connection.query)
    if not size.num_tools:
        body = {name: value for name, value in body.items() if name not in {"tools", "tool_choice"}}
    return Ask("POST", url, {**_agent(name), **headers, **key_headers(connection), **connection.headers}, body)


def models_request(name: str, api: Api, connection: Connection) -> Ask:
    """How clients of that API ask for the models."""
    base = connection.base_url.rstrip("/")
    paths = {
        Api.CHAT: "/models",
        Api.RESPONSES: "/models?client_version=0.171.0",
        Api.MESSAGES: "/v1/models?limit=1000",
        Api.GEMINI: "/v1beta/models",
    }
    version = {"anthropic-version": "2023-06-01"} if api is Api.MESSAGES else {}
    headers = {**_agent(name), **version, **key_headers(connection), **connection.headers}
    return Ask("GET", base + paths[api], headers)


def probe_request(api: Api, connection: Connection) -> Ask | None:
    """Claude Code looks at the bare address first."""
    return Ask("HEAD", connection.base_url.rstrip("/") + "/") if api is Api.MESSAGES else None


def key_headers(connection: Connection) -> dict[str, str]:
    if not connection.key:
        return {}
    is_bearer = connection.key_header == "Authorization"
    return {connection.key_header: f"Bearer {connection.key}" if is_bearer else connection.key}


def _agent(name: str) -> dict[str, str]:
    return {"User-Agent": f"kvgate-doctor (as {name})"}


def filler(length: int) -> str:
    return (_SENTENCE * (length // len(_SENTENCE) + 1))[:length]


def _schema(length: int) -> dict[str, Any]:
    text = {"type": "string", "description": filler(length)}
    return {"type": "object", "properties": {"path": text}, "required": ["path"], "additionalProperties": False}


def _tools(size: Size, shape: Callable[[str, dict[str, Any]], dict[str, Any]]) -> list[dict[str, Any]]:
    length = max(20, size.tools // max(1, size.num_tools) - 250)
    return [shape(f"tool_{i}", _schema(length)) for i in range(size.num_tools)]


Built = tuple[str, Mapping[str, str], dict[str, Any]]


def _chat(connection: Connection, size: Size) -> Built:
    system = [{"role": "system", "content": filler(size.instructions)}] if size.instructions else []
    body: dict[str, Any] = {
        "model": connection.model,
        "max_tokens": MAX_TOKENS,
        "messages": [*system, {"role": "user", "content": QUESTION}],
        "tools": _tools(
            size, lambda name, schema: {"type": "function", "function": {"name": name, "parameters": schema}}
        ),
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return "/chat/completions", {}, body


def _messages(connection: Connection, size: Size) -> Built:
    half = filler(size.instructions // 2)
    block = {"type": "text", "text": half, "cache_control": {"type": "ephemeral"}}
    body: dict[str, Any] = {
        "model": connection.model,
        "max_tokens": MAX_TOKENS,
        "system": [{"type": "text", "text": "You are a coding agent."}, block],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
            {"role": "system", "content": half},
        ],
        "tools": _tools(size, lambda name, schema: {"name": name, "description": name, "input_schema": schema}),
        "metadata": {"user_id": "kvgate-doctor"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "x-claude-code-session-id": "kvgate-doctor",
    }
    return "/v1/messages?beta=true", headers, body


def _responses(connection: Connection, size: Size) -> Built:
    def message(role: str, text: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    body: dict[str, Any] = {
        "model": connection.model,
        "input": [message("developer", filler(size.instructions)), message("user", QUESTION)],
        "tools": _tools(
            size, lambda name, schema: {"type": "function", "name": name, "strict": False, "parameters": schema}
        ),
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "kvgate-doctor",
        "max_output_tokens": MAX_TOKENS,
    }
    return "/responses", {"Accept": "text/event-stream", "originator": "kvgate-doctor"}, body


def _gemini(connection: Connection, size: Size) -> Built:
    declarations = _tools(size, lambda name, schema: {"name": name, "parametersJsonSchema": schema})
    body: dict[str, Any] = {
        "systemInstruction": {"role": "user", "parts": [{"text": filler(size.instructions)}]},
        "contents": [{"role": "user", "parts": [{"text": QUESTION}]}],
        "tools": [{"functionDeclarations": declarations}],
        "generationConfig": {"maxOutputTokens": MAX_TOKENS, "temperature": 0},
    }
    return f"/v1beta/models/{quote(connection.model, safe='')}:streamGenerateContent?alt=sse", {}, body


_BUILDERS: dict[Api, Callable[[Connection, Size], Built]] = {
    Api.CHAT: _chat,
    Api.MESSAGES: _messages,
    Api.RESPONSES: _responses,
    Api.GEMINI: _gemini,
}
