"""Content parts of OpenAI's Responses as those of chat completions. Pure: addresses are passed on, never opened."""

from __future__ import annotations

from typing import Any, Literal

from gateway.dialects.fields import kind, refuse

_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "summary_text": "text", "refusal": "refusal"}
_TEXTS["reasoning_text"] = "text"
_DETAILS = ("auto", "low", "high")  # what chat completions know
Medium = Literal["image_url", "file", "input_audio"]


def text_of(content: object, path: str) -> str:
    """Content that can only be text: parts are joined without a separator."""
    if isinstance(content, str):
        return content
    parts = read_parts(content, path)
    for index, part in enumerate(parts):
        if part["type"] != "text":
            refuse(f"`{path}[{index}]` must be text here.", f"{path}[{index}]")
    return "".join(part["text"] for part in parts)


def chat_content(content: object, path: str) -> str | list[dict[str, Any]]:
    """One text is a string; several parts stay apart, each at the index that it has with the client."""
    if isinstance(content, str):
        return content
    parts = read_parts(content, path)
    if all(part["type"] == "text" for part in parts) and len(parts) < 2:
        return "".join(part["text"] for part in parts)
    return parts


def read_parts(content: object, path: str) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        refuse(f"`{path}` must be a string or an array of parts, not {kind(content)}.", path)
    return [_part(part, f"{path}[{index}]") for index, part in enumerate(content)]


def _part(part: object, path: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        refuse(f"`{path}` must be an object, not {kind(part)}.", path)
    said = part.get("type")
    key = _TEXTS.get(said) if isinstance(said, str) else None
    if key is not None:
        return {"type": "text", "text": _string(part, key, path)}
    if said == "input_image":
        return _image(part, path)
    if said == "input_file":
        return _file(part, path)
    if said == "input_audio":
        return {"type": "input_audio", "input_audio": part.get("input_audio") or {}}
    shown = repr(said[:40]) if isinstance(said, str) else kind(said)
    allowed = "input_text, output_text, refusal, input_image, input_file or input_audio"
    return refuse(f"`{path}.type` must be {allowed}; it is {shown}.", f"{path}.type")


def _string(part: dict[str, Any], key: str, path: str) -> str:
    value = part.get(key)
    if not isinstance(value, str):
        refuse(f"`{path}.{key}` must be a string, not {kind(value)}.", f"{path}.{key}")
    return value


def _image(part: dict[str, Any], path: str) -> dict[str, Any]:
    if part.get("image_url") is None and part.get("file_id") is not None:
        refuse(f"`{path}.file_id`: no files are kept here. Send the image as `image_url`.", f"{path}.file_id")
    image: dict[str, Any] = {"url": _string(part, "image_url", path)}
    detail = part.get("detail")
    if detail in _DETAILS:
        image["detail"] = detail
    return {"type": "image_url", "image_url": image}


def _file(part: dict[str, Any], path: str) -> dict[str, Any]:
    for key in ("file_id", "file_url"):
        if part.get(key) is not None and part.get("file_data") is None:
            refuse(f"`{path}.{key}`: files are neither kept nor fetched here. Send `file_data`.", f"{path}.{key}")
    file: dict[str, Any] = {"file_data": _string(part, "file_data", path)}
    if isinstance(part.get("filename"), str):
        file["filename"] = part["filename"]
    return {"type": "file", "file": file}
