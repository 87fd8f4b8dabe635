"""An Anthropic Messages body as the chat form. Pure.

Betas of that API grow with every version of its clients: a field that nobody here knows is left out with a notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.dialects.anthropic_answer import MessagesContext
from gateway.dialects.anthropic_tools import read_tools
from gateway.dialects.anthropic_turns import read_conversation
from gateway.dialects.base import ChatForm
from gateway.dialects.chat_turns import is_prefill
from gateway.dialects.fields import Fields, kind, refuse
from gateway.dialects.reading import Reading
from gateway.dialects.sampling import unknown_field_notices

# Known, and without effect on an answer from anyone but Anthropic.
NO_EFFECT = (
    "stream", "cache_control", "service_tier", "diagnostics", "inference_geo", "speed", "anthropic_version",
    "user_profile_id", "workspace_id",
)  # fmt: skip

# Fields of the chat form that are not Anthropic's: a client that sends them (`extra_body`) means them.
EXTENSIONS = (
    "seed", "min_p", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "stop_token_ids", "ignore_eos", "cache_salt", "chat_template_kwargs",
)  # fmt: skip

MAX_USER_LENGTH = 64  # OpenAI refuses a longer `user`; Claude Code's id has 141 characters


def read_request(body: Mapping[str, Any], *, local: bool) -> ChatForm:
    """Raises `InvalidRequest` with the client's own names of fields."""
    fields, reading = Fields(body), Reading(local)
    fields.accept(NO_EFFECT)
    chat: dict[str, Any] = {}
    if model := fields.string("model"):
        chat["model"] = model
    chat["messages"] = read_conversation(fields.get("system"), fields.get("messages"), reading)
    if is_prefill(chat["messages"]):
        # vLLM and SGLang ask for both; an upstream that knows neither says so.
        chat |= {"continue_final_message": True} | ({} if local else {"add_generation_prompt": False})
    chat |= read_tools(fields, reading) | _sampling(fields) | _response_format(fields, reading)
    chat |= {name: value for name in EXTENSIONS if (value := fields.get(name)) is not None}
    chat |= _thinking(fields, reading, chat.get("chat_template_kwargs")) | _user(fields, reading)
    return ChatForm(chat, reading.notices + unknown_field_notices(fields), MessagesContext(reading.restored_names))


def _sampling(fields: Fields) -> dict[str, Any]:
    read = {
        "max_tokens": fields.integer("max_tokens", 1),
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1, above=True),
        "top_k": fields.integer("top_k", 0, 2**31 - 1),
        "stop": _stop_sequences(fields),
    }
    return {name: value for name, value in read.items() if value is not None}


def _stop_sequences(fields: Fields) -> list[str] | None:
    value = fields.get("stop_sequences")
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(stop, str) for stop in value):
        refuse("`stop_sequences` must be an array of strings.", "stop_sequences")
    if "" in value:
        refuse("`stop_sequences` must not hold an empty string.", "stop_sequences")
    return value


def _response_format(fields: Fields, reading: Reading) -> dict[str, Any]:
    """Structured output, by its name of today or that of its beta."""
    config = fields.mapping("output_config") or {}
    for key in config.keys() - {"format"}:
        if config[key] is not None:
            reading.remark("no effect", f"output_config.{key}")
    path, value = "output_config.format", config.get("format")
    if value is None:
        path, value = "output_format", fields.mapping("output_format")
    if value is None:
        return {}
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        refuse(f"`{path}.type` must be 'json_schema'.", path)
    schema = value.get("schema")
    if not isinstance(schema, dict):
        refuse(f"`{path}.schema` must be an object, not {kind(schema)}.", f"{path}.schema")
    named = {"name": "answer", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def _thinking(fields: Fields, reading: Reading, template_kwargs: object) -> dict[str, Any]:
    """A local model's template may have a switch for it. 'adaptive' leaves the choice to the model."""
    said = (fields.mapping("thinking") or {}).get("type")
    if said is None or said == "adaptive":
        return {}
    if said not in ("enabled", "disabled"):
        reading.remark("no effect", "thinking")
        return {}
    if not reading.local:
        reading.remark("no effect on an upstream that speaks OpenAI's chat", "thinking")
        return {}
    if said == "enabled":
        reading.remark("no effect", "thinking.budget_tokens")
    own = template_kwargs if isinstance(template_kwargs, dict) else {}
    if template_kwargs is not None and own is not template_kwargs:
        return {}  # refused by whoever reads the chat form
    return {"chat_template_kwargs": {"enable_thinking": said == "enabled"} | own}


def _user(fields: Fields, reading: Reading) -> dict[str, Any]:
    user_id = (fields.mapping("metadata") or {}).get("user_id")
    if user_id is not None and not isinstance(user_id, str):
        refuse(f"`metadata.user_id` must be a string, not {kind(user_id)}.", "metadata.user_id")
    usable = not reading.local and user_id is not None and 0 < len(user_id) <= MAX_USER_LENGTH
    return {"user": user_id} if usable else {}
