"""What a response object of OpenAI's Responses says again of its request. Pure."""

from __future__ import annotations

from typing import Any

from gateway.dialects.fields import Fields, kind, refuse
from gateway.dialects.responses_tools import ToolTable

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # those that the vendor's own types know
_SUMMARIES = ("auto", "concise", "detailed")


def read_echo(fields: Fields, table: ToolTable, text: dict[str, Any]) -> dict[str, Any]:
    """Every field that clients' types require, and the others as they were asked for."""
    return {
        "background": False,
        "instructions": fields.get("instructions"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "max_tool_calls": fields.integer("max_tool_calls", 0),
        "metadata": _metadata(fields),
        "parallel_tool_calls": fields.boolean("parallel_tool_calls", True),
        "prompt_cache_key": fields.string("prompt_cache_key"),
        "reasoning": _reasoning(fields),
        "safety_identifier": fields.string("safety_identifier"),
        "service_tier": "default",
        "store": fields.boolean("store", True),
        "temperature": fields.get("temperature"),
        "text": text,
        "tool_choice": fields.get("tool_choice") or "auto",
        "tools": table.echo,
        "top_logprobs": fields.get("top_logprobs") or 0,
        "top_p": fields.get("top_p"),
        "truncation": "disabled",
        "user": fields.string("user"),
    }


def _metadata(fields: Fields) -> dict[str, str]:
    value = fields.mapping("metadata") or {}
    for key, said in value.items():
        if not isinstance(said, str):
            refuse(f"`metadata[{key[:64]}]` must be a string, not {kind(said)}.", "metadata")
    return value


def _reasoning(fields: Fields) -> dict[str, Any]:
    value = fields.mapping("reasoning") or {}
    effort, summary = value.get("effort"), value.get("summary")
    return {
        "effort": effort if effort in _EFFORTS else None,
        "summary": summary if summary in _SUMMARIES else None,
    }
