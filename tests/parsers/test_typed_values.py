"""Texts without a type and the types that schemas ask for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cardan.parsers.typed_values import json_of, types_of

SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"Count": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}},
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "size": {"type": "number"},
        "flag": {"type": "boolean"},
        "items": {"type": "array"},
        "map": {"type": "object"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"type": ["integer", "string"]},
        "kind": {"enum": ["1", "2"]},
        "level": {"enum": [1, 2, None]},
        "fixed": {"const": True},
        "ref": {"$ref": "#/$defs/Count"},
        "loop": {"$ref": "#/$defs/Loop"},
        "away": {"$ref": "https://example.com/x"},
        "any": {},
    },
}

CASES: list[tuple[str, str, Any]] = [
    ("text", "5", "5"),
    ("text", " null ", " null "),
    ("count", "5", 5),
    ("count", "-7 ", -7),
    ("count", "5.0", 5),
    ("count", "5.5", "5.5"),
    ("count", "five", "five"),
    ("count", "9" * 40, int("9" * 40)),
    ("count", "9" * 5000, "9" * 5000),
    ("size", "5", 5),
    ("size", "1e3", 1000.0),
    ("size", "NaN", "NaN"),
    ("size", "1e999", "1e999"),
    ("size", "true", "true"),
    ("flag", "True", True),
    ("flag", "false", False),
    ("flag", "1", "1"),
    ("items", '["a", 1]', ["a", 1]),
    ("items", "['a', True, None]", ["a", True, None]),
    ("items", "a, b", "a, b"),
    ("items", "{}", "{}"),
    ("items", '["\\ud800"]', '["\\ud800"]'),
    ("items", "['\\udfff']", "['\\udfff']"),
    ("map", '{"a": [1e999]}', '{"a": [1e999]}'),
    ("map", '{"a": {"b": []}}', {"a": {"b": []}}),
    ("map", "{'a': 1}", {"a": 1}),
    ("map", "{'a'", "{'a'"),
    ("map", "{1, 2}", "{1, 2}"),
    ("items", "[" * 5000, "[" * 5000),
    ("maybe", "null", None),
    ("maybe", "none", "none"),
    ("either", "5", 5),
    ("either", "x", "x"),
    ("kind", "1", "1"),
    ("level", "2", 2),
    ("level", "null", None),
    ("fixed", "true", True),
    ("ref", "3", 3),
    ("loop", "3", 3),
    ("away", "[1]", [1]),
    ("any", "3", 3),
    ("any", "x", "x"),
    ("unknown", '{"a": 1}', {"a": 1}),
    ("unknown", "None", None),
]


@pytest.mark.parametrize(("name", "text", "value"), CASES, ids=[f"{case[0]}-{case[1][:20]}" for case in CASES])
def test_values(name: str, text: str, value: Any) -> None:
    assert json.loads(json_of(text, SCHEMA, name), parse_int=int if len(text) < 4000 else str) == value


def test_additional_properties() -> None:
    assert types_of({"additionalProperties": {"type": "string"}}, "x") == {"string"}
    assert types_of({"properties": 5}, "x") == frozenset()
