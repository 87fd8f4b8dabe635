"""Schemas of the Gemini API become JSON schemas; JSON schemas stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from gateway.core.errors import InvalidRequest
from gateway.dialects.gemini_schema import json_schema


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"type": "STRING"}, {"type": "string"}),
        ({"type": "string", "description": "d"}, {"type": "string", "description": "d"}),
        ({"type": "TYPE_UNSPECIFIED", "title": "t"}, {"title": "t"}),
        ({"type": "INTEGER", "format": "int64"}, {"type": "integer"}),
        ({"type": "STRING", "format": "date-time"}, {"type": "string", "format": "date-time"}),
        ({"type": "STRING", "format": "enum", "enum": ["A", "B"]}, {"type": "string", "enum": ["A", "B"]}),
        ({"type": "STRING", "nullable": True}, {"type": ["string", "null"]}),
        ({"type": "STRING", "nullable": False}, {"type": "string"}),
        ({"type": "STRING", "enum": ["A"], "nullable": True}, {"type": ["string", "null"], "enum": ["A", None]}),
        ({"anyOf": [{"type": "STRING"}], "nullable": True}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ({"any_of": [{"type": "STRING"}]}, {"anyOf": [{"type": "string"}]}),
        (
            {"type": "ARRAY", "items": {"type": "NUMBER"}, "minItems": "1", "max_items": 3},
            {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
        ),
        ({"type": "STRING", "example": "x"}, {"type": "string", "examples": ["x"]}),
        ({"type": "STRING", "default": None, "pattern": "^a$"}, {"type": "string", "pattern": "^a$"}),
        ({"type": ["STRING", "NULL"]}, {"type": ["string", "null"]}),
        (
            {"type": "object", "$defs": {"A_b": {"type": "string"}}},
            {"type": "object", "$defs": {"A_b": {"type": "string"}}},
        ),
        ({"$ref": "#/$defs/A", "additionalProperties": False}, {"$ref": "#/$defs/A", "additionalProperties": False}),
    ],
)
def test_a_schema_and_what_it_becomes(said: dict[str, Any], expected: dict[str, Any]) -> None:
    assert json_schema(said, "p") == expected
    Draft202012Validator.check_schema(json_schema(said, "p"))


def test_names_of_properties_and_values_are_never_touched() -> None:
    said = {
        "type": "OBJECT",
        "properties": {"file_path": {"type": "STRING"}, "type": {"type": "STRING", "enum": ["STRING"]}},
        "required": ["file_path"],
        "default": {"some_key": "OBJECT"},
    }
    assert json_schema(said, "p") == {
        "type": "object",
        "properties": {"file_path": {"type": "string"}, "type": {"type": "string", "enum": ["STRING"]}},
        "required": ["file_path"],
        "default": {"some_key": "OBJECT"},
    }


def test_the_order_that_was_asked_for_is_the_order_of_the_properties() -> None:
    said = {"type": "OBJECT", "properties": {"a": {}, "b": {}, "c": {}}, "propertyOrdering": ["c", "x", "a"]}
    assert list(json_schema(said, "p")["properties"]) == ["c", "a", "b"]
    assert "propertyOrdering" not in json_schema(said, "p")


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ([], "p"),
        ({"type": "TEXT"}, "p.type"),
        ({"type": 1}, "p.type"),
        ({"properties": {"a": {"type": "TEXT"}}}, "p.properties.a.type"),
        ({"anyOf": [{"type": "STRING"}, 1]}, "p.anyOf[1]"),
    ],
)
def test_what_is_no_schema_is_refused_by_its_place(said: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        json_schema(said, "p")
    assert caught.value.param == param


SCHEMAS = st.recursive(
    st.sampled_from([{"type": "string"}, {"type": "integer", "minimum": 1}, {"enum": ["a", None]}, {"const": 1}, {}]),
    lambda inner: st.one_of(
        st.builds(lambda item: {"type": "array", "items": item}, inner),
        st.builds(lambda items: {"anyOf": items}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda named: {"type": "object", "properties": named, "additionalProperties": False},
            st.dictionaries(st.text(max_size=5), inner, max_size=3),
        ),
    ),
    max_leaves=6,
)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(SCHEMAS)
def test_a_json_schema_stays_as_it_is(schema: Any) -> None:
    assert json_schema(schema, "p") == schema
