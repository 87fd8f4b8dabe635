"""`generationConfig` of the Gemini API as fields of OpenAI's chat. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.dialects.fields import Fields, kind, refuse
from gateway.dialects.gemini_schema import json_schema
from gateway.dialects.gemini_spelling import camel_keys, fields_at
from gateway.dialects.reading import Reading

NAME = "generationConfig"
# Known, and without effect on an answer in text.
_NO_EFFECT = (
    "responseLogprobs", "logprobs", "speechConfig", "imageConfig", "mediaResolution", "audioTimestamp",
    "enableEnhancedCivicAnswers", "enableAffectiveDialog", "routingConfig", "modelSelectionConfig", "translationConfig",
)  # fmt: skip
_TEXT, _JSON = "text/plain", "application/json"
_SCHEMAS = ("responseSchema", "responseJsonSchema", "_responseJsonSchema")


class GenerationConfig:
    """One request's, read once."""

    def __init__(self, value: Mapping[str, Any], reading: Reading) -> None:
        said = camel_keys(value, NAME)
        self._reading = reading
        self._fields = Fields({f"{NAME}.{key}": _whole(item) for key, item in said.items()})
        self.include_thoughts = False

    def chat_fields(self) -> dict[str, Any]:
        for name in _NO_EFFECT:
            if self._get(name):
                self._reading.remark("no effect", f"{NAME}.{name}")
        self._check_modalities()
        return self._sampling() | self._response_format() | self._thinking()

    def unknown(self) -> list[str]:
        return self._fields.unknown()

    def _get(self, name: str) -> Any:
        return self._fields.get(f"{NAME}.{name}")

    def _sampling(self) -> dict[str, Any]:
        fields = self._fields
        read = {
            "max_tokens": fields.integer(f"{NAME}.maxOutputTokens", 1),
            "temperature": fields.number(f"{NAME}.temperature", 0, 2),
            "top_p": fields.number(f"{NAME}.topP", 0, 1, above=True),
            "top_k": self._top_k(),
            "n": fields.integer(f"{NAME}.candidateCount", 1),
            "seed": fields.integer(f"{NAME}.seed"),
            "presence_penalty": fields.number(f"{NAME}.presencePenalty", -2, 2),
            "frequency_penalty": fields.number(f"{NAME}.frequencyPenalty", -2, 2),
            "stop": self._stop_sequences(),
        }
        return {name: value for name, value in read.items() if value is not None}

    def _top_k(self) -> int | None:
        """Gemini CLI sends it each time, and OpenAI's own API refuses it."""
        value = self._fields.integer(f"{NAME}.topK", 0, 2**31 - 1)
        if value is None or self._reading.local:
            return value
        self._reading.remark("no effect on an upstream that speaks OpenAI's chat", f"{NAME}.topK")
        return None

    def _stop_sequences(self) -> list[str] | None:
        value, path = self._get("stopSequences"), f"{NAME}.stopSequences"
        if value is None or value == []:
            return None
        if not isinstance(value, list) or not all(isinstance(stop, str) for stop in value):
            refuse(f"`{path}` must be an array of strings.", path)
        if "" in value:
            refuse(f"`{path}` must not hold an empty string.", path)
        return value

    def _check_modalities(self) -> None:
        value, path = self._get("responseModalities"), f"{NAME}.responseModalities"
        if value is None or value == []:
            return
        if not isinstance(value, list) or "TEXT" not in [item.upper() for item in value if isinstance(item, str)]:
            refuse(f"`{path}` must hold TEXT: no other kind of answer is made here.", path)
        if len(value) > 1:
            self._reading.remark("no effect", f"{path} beyond TEXT")

    def _response_format(self) -> dict[str, Any]:
        media_type, path = self._fields.string(f"{NAME}.responseMimeType"), f"{NAME}.responseMimeType"
        if media_type not in (None, "", _TEXT, _JSON):
            refuse(f"`{path}` must be {_TEXT!r} or {_JSON!r}; it is {media_type[:80]!r}.", path)
        said = [name for name in _SCHEMAS if self._get(name) is not None]
        if len(said) > 1:
            refuse(f"`{NAME}.{said[0]}` and `{NAME}.{said[1]}` exclude each other. Send one.", f"{NAME}.{said[1]}")
        if not said:
            return {"response_format": {"type": "json_object"}} if media_type == _JSON else {}
        if media_type == _TEXT:
            refuse(f"`{NAME}.{said[0]}` needs `{path}` to be {_JSON!r}.", path)
        named = {"name": "answer", "schema": self._schema(said[0]), "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": named}}

    def _schema(self, name: str) -> dict[str, Any]:
        value, path = self._get(name), f"{NAME}.{name}"
        if name == "responseSchema":
            return json_schema(value, path)
        if not isinstance(value, dict):
            refuse(f"`{path}` must be an object, not {kind(value)}.", path)
        return value

    def _thinking(self) -> dict[str, Any]:
        """A budget of none, or of some tokens, moves the switch that a local model's template may have."""
        path = f"{NAME}.thinkingConfig"
        said = fields_at(self._fields.mapping(path) or {}, path)
        config = Fields({f"{path}.{key}": _whole(value) for key, value in said.items()})
        self.include_thoughts = config.boolean(f"{path}.includeThoughts")
        budget, level = config.integer(f"{path}.thinkingBudget", -1), config.string(f"{path}.thinkingLevel")
        if level is not None:
            self._reading.remark("no effect", f"{path}.thinkingLevel")
        for name in config.unknown():
            self._reading.remark("no effect", name)
        if budget is None or budget < 0:
            return {}
        if not self._reading.local:
            self._reading.remark("no effect on an upstream that speaks OpenAI's chat", f"{path}.thinkingBudget")
            return {}
        if budget:
            self._reading.remark("no limit, only a switch", f"{path}.thinkingBudget")
        return {"chat_template_kwargs": {"enable_thinking": budget > 0}}


def _whole(value: Any) -> Any:
    """The API's clients send counts as 64.0 too."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value
