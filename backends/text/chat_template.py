"""Renders chat messages by a model's own template, or says clearly why that can't be done. Knows nothing of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from backends.protocol.messages import ChatPrompt

Render = Callable[..., str]

MAX_ERROR_CHARS = 300

# What a request may not set through template_kwargs: they are ours, or would replace the model's template.
_RESERVED = frozenset(
    {
        "continue_final_message",
        "conversation",
        "chat_template",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


class PromptError(Exception):
    """The prompt can't be given to the model: what is wrong, and which field it is about."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def render_chat(prompt: ChatPrompt, apply_template: Render) -> str:
    """`apply_template` is a tokenizer's `apply_chat_template`."""
    _check_messages(prompt.messages)
    _check_kwargs(prompt.template_kwargs)
    options = {"add_generation_prompt": not prompt.continue_final_message, **prompt.template_kwargs}
    if prompt.continue_final_message:
        options |= {"add_generation_prompt": False, "continue_final_message": True}

    def apply(messages: list[dict[str, Any]]) -> str:
        return apply_template(messages, tools=prompt.tools or None, tokenize=False, **options)

    try:
        rendered = apply(prompt.messages)
    except Exception as error:  # whatever a template raises is about these messages
        rendered = _apply_without_null(prompt.messages, apply, error)
    for role in ("system", "user"):
        _check_kept(prompt.messages, role, rendered)
    return rendered


def _apply_without_null(
    messages: list[dict[str, Any]], apply: Callable[[list[dict[str, Any]]], str], error: Exception
) -> str:
    """Simple templates can't print the null content of an assistant message with tool calls: it becomes empty."""
    if all(message.get("content") is not None for message in messages):
        raise _refused(error) from error
    try:
        return apply([message | {"content": message.get("content") or ""} for message in messages])
    except Exception as second:
        raise _refused(second) from second


def _refused(error: Exception) -> PromptError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    message = lines[0][:MAX_ERROR_CHARS]
    return PromptError(f"The model's chat template can't render these messages: {message}", "messages")


def _check_messages(messages: Sequence[dict[str, Any]]) -> None:
    if not messages:
        raise PromptError("messages is empty: give at least one message.", "messages")
    for position, message in enumerate(messages):
        if message.get("role") in ("system", "user") and message.get("content") is None:
            raise PromptError(f"messages[{position}] has no content; expected text.", f"messages[{position}].content")
    if not any(_has_substance(message) for message in messages):
        raise PromptError("No message has any text: give at least one that isn't blank.", "messages")


def _has_substance(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return bool(message.get("tool_calls")) or (isinstance(content, str) and bool(content.strip()))


def _check_kwargs(template_kwargs: dict[str, Any]) -> None:
    if taken := sorted(_RESERVED.intersection(template_kwargs)):
        raise PromptError(
            f"chat_template_kwargs may not set {', '.join(taken)}; allowed is what the model's template itself reads.",
            "chat_template_kwargs",
        )


def _check_kept(messages: Sequence[dict[str, Any]], role: str, rendered: str) -> None:
    """A template that silently drops what a role said would have the model answer something else."""
    texts = [message["content"].strip() for message in messages if message.get("role") == role]
    texts = [text for text in texts if text]
    if not texts or any(text in rendered for text in texts):
        return
    squeezed = "".join(rendered.split())
    if not any("".join(text.split()) in squeezed for text in texts):
        raise PromptError(f"The model's chat template drops {role} messages: nothing of them is left.", "messages")
