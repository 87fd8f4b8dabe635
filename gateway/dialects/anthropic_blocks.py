"""Content blocks of the Anthropic API as text or as parts of an OpenAI chat message. Pure; fetches nothing.

`cache_control` is never read, so that a marker that moves from turn to turn leaves the prompt as it was. A block that
nobody here knows is told as text: the model sees it, and the client a notice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from gateway.dialects.chat_turns import BETWEEN_TEXTS, ChatPart, text_part
from gateway.dialects.fields import kind, refuse
from gateway.dialects.reading import Reading, filled_string_at, mapping_at, string_at

Block = tuple[str, dict[str, Any]]  # its path in the body, and itself

_LEFT_OUT = "[{} left out: this model reads text only]"
_BELOW = "[{} attached below]"
_READABLE = "A text-only model takes blocks of type 'text', 'tool_use', 'tool_result' and documents in plain text."


def read_blocks(content: object, path: str) -> list[Block]:
    """The blocks of a `content` that are not empty text. A string is one block of text."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        refuse(f"`{path}` must be a string or an array of blocks, not {kind(content)}.", path)
    blocks = [(f"{path}[{index}]", block) for index, block in enumerate(content)]
    return [block for block in map(_checked, blocks) if not _is_empty_text(block)]


def _checked(block: tuple[str, object]) -> Block:
    path, value = block
    fields = mapping_at(value, path)
    filled_string_at(fields, "type", path)
    if fields["type"] == "text":
        string_at(fields, "text", path)
    return path, fields


def _is_empty_text(block: Block) -> bool:
    return block[1]["type"] == "text" and not block[1]["text"]


def user_parts(block: Block, reading: Reading) -> list[ChatPart]:
    """A block that a user wrote or attached."""
    path, fields = block
    match fields["type"]:
        case "text":
            return [text_part(fields["text"])]
        case "image":
            if reading.local:
                refuse(f"`{path}` is an image, which the model can't see. {_READABLE}", path)
            return [_image(fields, path)]
        case "document":
            return [_document(fields, path, reading)]
        case "search_result":
            return [text_part(_search_result(fields, path))]
        case _:
            return [text_part(told_as_text(block, reading))]


def result_parts(block: Block, reading: Reading) -> tuple[str, list[ChatPart]]:
    """A block of a tool's result: its text, and what can't stand in a tool message and goes to the user's.

    Unlike a user's own image, one that a tool returned isn't refused for a text-only model: it stays in the history, so
    that every later turn would be refused too.
    """
    fields = block[1]
    if fields["type"] == "image" and reading.local:
        return _left_out("image", reading), []
    if fields["type"] == "document" and reading.local and not _is_text_document(fields):
        return _left_out("document", reading), []
    texts: list[str] = []
    attached: list[ChatPart] = []
    for part in user_parts(block, reading):
        if part["type"] == "text":
            texts.append(part["text"])
        else:
            texts.append(_BELOW.format(fields["type"]))
            attached.append(part)
    return BETWEEN_TEXTS.join(texts), attached


def _left_out(what: str, reading: Reading) -> str:
    reading.remark("left out of tool results, since the model reads text only", what)
    return _LEFT_OUT.format(what)


def told_as_text(block: Block, reading: Reading) -> str:
    """A block without a counterpart, as JSON behind its type."""
    fields = block[1]
    reading.remark("blocks told to the model as text", fields["type"])
    shown = {key: value for key, value in _without_markers(fields).items() if key != "type"}
    return f"[{fields['type']}] {json.dumps(shown, ensure_ascii=False)}"


def _without_markers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_markers(item) for key, item in value.items() if key != "cache_control"}
    if isinstance(value, list):
        return [_without_markers(item) for item in value]
    return value


# ------------------------------------------------------------------------------------------------ images, documents


def _source(fields: dict[str, Any], path: str, *known: str) -> dict[str, Any]:
    source = mapping_at(fields.get("source"), f"{path}.source")
    if source.get("type") not in known:
        shown = source["type"][:40] if isinstance(source.get("type"), str) else kind(source.get("type"))
        refuse(f"`{path}.source.type` must be one of {', '.join(known)}; it is {shown}.", f"{path}.source.type")
    return source


def _image(fields: dict[str, Any], path: str) -> ChatPart:
    source = _source(fields, path, "base64", "url")
    url = string_at(source, "url", f"{path}.source") if source["type"] == "url" else _data_url(source, path)
    return {"type": "image_url", "image_url": {"url": url}}


def _data_url(source: dict[str, Any], path: str) -> str:
    media_type, data = (string_at(source, key, f"{path}.source") for key in ("media_type", "data"))
    return f"data:{media_type};base64,{data}"


def _is_text_document(fields: dict[str, Any]) -> bool:
    source = fields.get("source")
    return isinstance(source, dict) and source.get("type") in ("text", "content")


def _document(fields: dict[str, Any], path: str, reading: Reading) -> ChatPart:
    if _is_text_document(fields):
        return text_part(BETWEEN_TEXTS.join(_document_texts(fields, path)))
    if reading.local:
        refuse(f"`{path}` is a document that isn't text, which the model can't read. {_READABLE}", path)
    source = _source(fields, path, "text", "content", "base64")
    name = fields.get("title")
    shown = name if isinstance(name, str) and name else "document.pdf"
    return {"type": "file", "file": {"filename": shown, "file_data": _data_url(source, path)}}


def _document_texts(fields: dict[str, Any], path: str) -> Iterator[str]:
    yield from (fields[key] for key in ("title", "context") if isinstance(fields.get(key), str) and fields[key])
    source = fields["source"]
    if source["type"] == "text":
        yield string_at(source, "data", f"{path}.source")
    else:
        yield from _texts_of(source.get("content"), f"{path}.source.content")


def _search_result(fields: dict[str, Any], path: str) -> str:
    head = [fields[key] for key in ("title", "source") if isinstance(fields.get(key), str) and fields[key]]
    return BETWEEN_TEXTS.join([*head, *_texts_of(fields.get("content"), f"{path}.content")])


def _texts_of(content: object, path: str) -> list[str]:
    """Text blocks inside a block; no other type may stand there."""
    blocks = read_blocks(content, path)
    for block_path, fields in blocks:
        if fields["type"] != "text":
            refuse(f"`{block_path}.type` must be 'text' inside a document.", f"{block_path}.type")
    return [fields["text"] for _, fields in blocks]
