"""How a model marks calls and reasoning in its text, told from its chat template. Pure.

The words are `gateway.service`'s: `tool_format` hermes, llama3, mistral or json, `reasoning_format` think or bracket;
"" where nothing is known. A model whose template takes no tools is told of them in words (`tool_prompt`), and asked to
answer as Hermes does.
"""

from __future__ import annotations

from collections.abc import Sequence

# Marks that a tokenizer may have as special tokens, which otherwise have no text.
TOOL_MARKS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
}
REASONING_MARKS: dict[str, tuple[str, str]] = {"think": ("<think>", "</think>"), "bracket": ("[THINK]", "[/THINK]")}

# Calls that are no JSON inside the mark of Hermes: Qwen 3 Coder's and GLM's.
_OTHER_CALLS = ("<function=", "<arg_key>")


def tool_format(templates: Sequence[str], *, takes_tools: bool) -> str:
    if not templates:
        return ""
    if not takes_tools:
        return "hermes"
    text = "\n".join(templates)
    if any(mark in text for mark in _OTHER_CALLS):
        return ""
    if "[TOOL_CALLS]" in text:
        return "mistral"
    if "<|python_tag|>" in text or ('"parameters": dictionary' in text and "<|eot_id|>" in text):
        return "llama3"
    return "hermes" if "<tool_call>" in text else "json"


def reasoning_format(templates: Sequence[str]) -> str:
    text = "\n".join(templates)
    return next((name for name, marks in REASONING_MARKS.items() if any(mark in text for mark in marks)), "")


def opens_reasoning(text: str, name: str) -> bool:
    """Whether reasoning was begun and not ended."""
    opening, closing = REASONING_MARKS[name]
    return text.rfind(opening) > text.rfind(closing)
