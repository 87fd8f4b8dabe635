"""Parts of a Gemini content as text or as parts of an OpenAI chat message. Pure; fetches nothing.

`thoughtSignature` is never read: only Google's own models can. A part that nobody here knows is told as text: the model
sees it, and the client a notice.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Any

from gateway.dialects.chat_turns import ChatPart, text_part
from gateway.dialects.fields import kind, refuse
from gateway.dialects.gemini_spelling import fields_at
from gateway.dialects.reading import Reading, string_at

KINDS = ("text", "inlineData", "fileData", "functionCall", "functionResponse")
_MARKS = frozenset({"thought", "thoughtSignature", "videoMetadata", "partMetadata", "mediaResolution"})
_LEFT_OUT = "[{} left out: the model can't read it]"
_AUDIO = {"audio/wav": "wav", "audio/x-wav": "wav", "audio/mp3": "mp3", "audio/mpeg": "mp3"}
_TAKEN = "image/*, audio/wav, audio/mp3, application/pdf or text/*"


@dataclass(frozen=True, slots=True)
class Part:
    """`kind` is one of KINDS, or the name of what isn't known."""

    path: str
    kind: str
    value: Any
    thought: bool = False
    returned: bool = False  # came with a tool's result; the user attached nothing


def read_parts(value: object, path: str, reading: Reading) -> list[Part]:
    """The parts that hold something. A string is one part of text."""
    if isinstance(value, str):
        value = [{"text": value}]
    if not isinstance(value, list):
        refuse(f"`{path}` must be an array of parts, not {kind(value)}.", path)
    read = [_part(item, f"{path}[{index}]", reading) for index, item in enumerate(value)]
    return [part for part in read if part is not None]


def _part(value: object, path: str, reading: Reading) -> Part | None:
    fields = fields_at(value, path)
    thought = fields.get("thought", False)
    if not isinstance(thought, bool):
        refuse(f"`{path}.thought` must be true or false, not {kind(thought)}.", f"{path}.thought")
    names = [name for name in fields if name not in _MARKS]
    known = [name for name in names if name in KINDS]
    if len(known) > 1:
        refuse(f"`{path}` must hold one of {', '.join(KINDS)}; it holds {', '.join(known)}.", path)
    for name in names if known else names[1:]:
        if name not in known:
            reading.remark("keys of parts without effect", name)
    chosen = next(iter(known or names), None)
    if chosen is None:
        return None
    if chosen == "text" and not string_at(fields, "text", path):
        return None
    return Part(path, chosen, fields[chosen], thought)


def user_part(part: Part, reading: Reading) -> ChatPart:
    """What a user wrote or attached, or a tool returned beside its result.

    Only what the user attached is refused where the model can't see it: what a tool returned stays in the history, so
    that every later turn would be refused too.
    """
    if part.kind == "text":
        return text_part(part.value)
    if part.kind == "inlineData":
        return _inline(part, reading)
    if part.kind == "fileData":
        return _file(part, reading)
    return text_part(told_as_text(part, reading))


def told_as_text(part: Part, reading: Reading) -> str:
    """A part without a counterpart, as JSON behind its name."""
    reading.remark("parts told to the model as text", part.kind)
    return f"[{part.kind}] {json.dumps(part.value, ensure_ascii=False)}"


# ---------------------------------------------------------------------------------------------- images, files and audio


def _inline(part: Part, reading: Reading) -> ChatPart:
    path = f"{part.path}.inlineData"
    fields = fields_at(part.value, path)
    media_type, data = (string_at(fields, key, path) for key in ("mimeType", "data"))
    media_type = media_type.partition(";")[0].strip().lower()
    if media_type.startswith("text/"):
        return text_part(_decoded(data, path))
    name = fields.get("displayName")
    attached = None if reading.local else _attached(media_type, data, name if isinstance(name, str) else "")
    return _unseen(part, path, media_type, reading) if attached is None else attached


def _decoded(data: str, path: str) -> str:
    try:
        return base64.b64decode(data, validate=True).decode()
    except (binascii.Error, ValueError):
        refuse(f"`{path}.data` must be base64 of text in UTF-8.", f"{path}.data")


def _attached(media_type: str, data: str, name: str) -> ChatPart | None:
    """As OpenAI's chat has it; None if it hasn't."""
    url = f"data:{media_type};base64,{data}"
    if media_type.startswith("image/"):
        return {"type": "image_url", "image_url": {"url": url}}
    if media_type in _AUDIO:
        return {"type": "input_audio", "input_audio": {"data": data, "format": _AUDIO[media_type]}}
    if media_type == "application/pdf":
        return {"type": "file", "file": {"filename": name or "document.pdf", "file_data": url}}
    return None


def _file(part: Part, reading: Reading) -> ChatPart:
    """Only what is open to everyone: nobody but Google reaches files that were uploaded to it."""
    path = f"{part.path}.fileData"
    fields = fields_at(part.value, path)
    uri, media_type = string_at(fields, "fileUri", path), fields.get("mimeType")
    shown = media_type if isinstance(media_type, str) else ""
    if not reading.local and shown.startswith("image/") and uri.startswith(("https://", "http://")):
        return {"type": "image_url", "image_url": {"url": uri}}
    return _unseen(part, path, shown, reading)


def _unseen(part: Part, path: str, media_type: str, reading: Reading) -> ChatPart:
    shown = media_type[:80] or "file"
    if not part.returned:
        passed_on = f"can't be passed on. Send {_TAKEN} as `inlineData`."
        why = "a text-only model can't read. It takes text." if reading.local else passed_on
        refuse(f"`{path}` is of type {shown!r}, which {why}", path)
    reading.remark("left out of tool results, since the model can't read them", shown)
    return text_part(_LEFT_OUT.format(shown))
