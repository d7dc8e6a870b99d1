"""For every keyword of JSON Schema: a schema, instances that conform to it, and instances that only it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One keyword in use.

    Attributes:
        keyword: its name; a word behind a slash tells uses of one keyword apart.
        schema: that uses it.
        good: instances that conform.
        bad: instances that do not, because of this keyword.
    """

    keyword: str
    schema: Any
    good: tuple[Any, ...]
    bad: tuple[Any, ...]

    @property
    def name(self) -> str:
        return self.keyword.partition("/")[0]


def obj(*, required: tuple[str, ...] = (), extra: Any = False, **properties: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": list(required)}
    if extra is not True:
        schema["additionalProperties"] = extra
    return schema


TEXT, NUMBER, WHOLE = {"type": "string"}, {"type": "number"}, {"type": "integer"}


def formatted(name: str, good: tuple[str, ...], bad: tuple[str, ...]) -> Case:
    return Case(f"format/{name}", {"type": "string", "format": name}, good, bad)


CASES: tuple[Case, ...] = (
    # types and values
    Case("type/string", TEXT, ("", 'aé\n"x'), (1, None, True, [], {})),
    Case("type/integer", WHOLE, (0, -12, 12345), (1.5, "1", None)),
    Case("type/number", NUMBER, (0, -1.25, 1e10), ("1", None, True)),
    Case("type/boolean", {"type": "boolean"}, (True, False), (0, "true", None)),
    Case("type/null", {"type": "null"}, (None,), (0, "", False)),
    Case("type/object", {"type": "object"}, ({}, {"a": 1}), ([], 1, "x")),
    Case("type/array", {"type": "array"}, ([], [1, "a"]), ({}, 1, "x")),
    Case("type/list", {"type": ["string", "null"]}, ("x", None), (1, True, [])),
    Case("enum", {"enum": ["red", 3, None, {"a": [1]}]}, ("red", 3, None, {"a": [1]}), ("blue", 4, {"a": [2]})),
    Case("const", {"const": {"a": "b"}}, ({"a": "b"},), ({"a": "c"}, {}, 1)),
    # numbers
    Case("minimum", {"type": "integer", "minimum": 10}, (10, 11, 200), (9, 0, -50)),
    Case("maximum", {"type": "integer", "maximum": 10}, (10, 9, -5), (11, 200)),
    Case("exclusiveMinimum", {"type": "integer", "exclusiveMinimum": 10}, (11, 100), (10, 9)),
    Case("exclusiveMaximum", {"type": "integer", "exclusiveMaximum": 10}, (9, 0), (10, 11)),
    Case("minimum/number", {"type": "number", "minimum": 0.5, "maximum": 1.5}, (0.5, 1, 1.25), (0.25, 1.75, 2)),
    Case(
        "exclusiveMinimum/number",
        {"type": "number", "exclusiveMinimum": 0.5, "exclusiveMaximum": 1.5},
        (0.75, 1),
        (0.5, 1.5),
    ),
    Case("multipleOf", {"type": "integer", "multipleOf": 7}, (0, 7, 49), (1, 8, 48)),
    # strings
    Case("minLength", {"type": "string", "minLength": 3}, ("abc", "äöü", "abcd"), ("", "ab")),
    Case("maxLength", {"type": "string", "maxLength": 3}, ("", "abc"), ("abcd",)),
    Case("pattern", {"type": "string", "pattern": "^[a-f]+[0-9]{2}$"}, ("a12", "fade99"), ("x12", "a1", "a123")),
    Case("pattern/unanchored", {"type": "string", "pattern": "[0-9]"}, ("a1b", "7"), ("ab", "")),
    formatted("date", ("2024-02-28",), ("2024-2-28", "2024-13-01", "tomorrow")),
    formatted("time", ("12:30:45Z",), ("25:00:00Z", "noon")),
    formatted("date-time", ("2024-02-28T12:30:45Z",), ("2024-02-28", "2024-02-28T25:30:45Z")),
    formatted("duration", ("P3D", "PT5M"), ("3 days", "P")),
    formatted("email", ("a@example.org",), ("a example.org", "nobody")),
    formatted("hostname", ("www.example.org",), ("-a.example.org", "a b")),
    formatted("ipv4", ("127.0.0.1",), ("127.0.0.256", "127.0.0")),
    formatted("ipv6", ("::1", "2001:db8:0:0:0:0:0:1"), ("12345::", "127.0.0.1.2")),
    formatted("uuid", ("3e4666bf-d5e5-4aa7-b8ce-cefe41c7568a",), ("3e4666bf-d5e5-4aa7-b8ce", "x")),
    formatted("uri", ("https://example.org/a?b=c#d",), ("example", "//no-scheme")),
    # arrays
    Case("items", {"type": "array", "items": WHOLE}, ([], [1, 2]), (["a"], [1, None])),
    Case("items/false", {"type": "array", "items": False}, ([],), ([1],)),
    Case("prefixItems", {"type": "array", "prefixItems": [WHOLE, TEXT]}, ([1, "a"], [1, "a", None]), (["a"], [1, 2])),
    Case(
        "additionalItems",
        {"type": "array", "items": [WHOLE, TEXT], "additionalItems": False},
        ([1, "a"], [1]),
        ([1, "a", 2], ["a"]),
    ),
    Case("minItems", {"type": "array", "items": WHOLE, "minItems": 2}, ([1, 2], [1, 2, 3]), ([], [1])),
    Case("maxItems", {"type": "array", "items": WHOLE, "maxItems": 2}, ([], [1, 2]), ([1, 2, 3],)),
    Case("uniqueItems", {"type": "array", "items": WHOLE, "uniqueItems": True}, ([], [1, 2]), ([1, 1],)),
    Case("contains", {"type": "array", "contains": {"const": 5}}, ([5], [1, 5]), ([], [1])),
    Case("minContains", {"type": "array", "contains": {"const": 5}, "minContains": 2}, ([5, 5],), ([5], [])),
    Case("maxContains", {"type": "array", "contains": {"const": 5}, "maxContains": 1}, ([5],), ([5, 5],)),
    Case(
        "unevaluatedItems",
        {"type": "array", "prefixItems": [WHOLE], "unevaluatedItems": False},
        ([1], []),
        ([1, 2],),
    ),
    # objects
    Case("properties", obj(a=WHOLE, b=TEXT), ({}, {"a": 1, "b": "x"}), ({"a": "x"}, {"b": 1})),
    Case("required", obj(a=WHOLE, b=TEXT, required=("a", "b")), ({"a": 1, "b": ""},), ({}, {"a": 1}, {"b": ""})),
    Case("required/undeclared", {"type": "object", "required": ["z"]}, ({"z": 1},), ({}, {"a": 1})),
    Case("additionalProperties", obj(a=WHOLE), ({"a": 1},), ({"b": 1}, {"a": 1, "b": 2})),
    Case("additionalProperties/schema", obj(a=TEXT, extra=WHOLE), ({"a": "x", "b": 1}, {}), ({"b": "x"},)),
    Case(
        "patternProperties",
        {"type": "object", "patternProperties": {"^n_": WHOLE}, "additionalProperties": False},
        ({"n_a": 1}, {}),
        ({"n_a": "x"}, {"m": 1}),
    ),
    Case("propertyNames", {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}, ({"abc": 1},), ({"A1": 1},)),
    Case(
        "minProperties",
        {"type": "object", "additionalProperties": WHOLE, "minProperties": 2},
        ({"a": 1, "b": 2},),
        ({}, {"a": 1}),
    ),
    Case(
        "maxProperties",
        {"type": "object", "additionalProperties": WHOLE, "maxProperties": 1},
        ({}, {"a": 1}),
        ({"a": 1, "b": 2},),
    ),
    Case(
        "dependentRequired",
        {"type": "object", "properties": {"a": WHOLE, "b": WHOLE}, "dependentRequired": {"a": ["b"]}},
        ({"a": 1, "b": 2}, {"b": 1}),
        ({"a": 1},),
    ),
    Case(
        "dependentSchemas",
        {"type": "object", "properties": {"a": WHOLE}, "dependentSchemas": {"a": {"required": ["b"]}}},
        ({"a": 1, "b": 2},),
        ({"a": 1},),
    ),
    Case(
        "dependencies",
        {"type": "object", "properties": {"a": WHOLE, "b": WHOLE}, "dependencies": {"a": ["b"]}},
        ({"a": 1, "b": 2}, {"b": 1}),
        ({"a": 1},),
    ),
    Case(
        "unevaluatedProperties",
        {"type": "object", "properties": {"a": WHOLE}, "unevaluatedProperties": False},
        ({"a": 1}, {}),
        ({"b": 1},),
    ),
    # composition and references
    Case("anyOf", {"anyOf": [WHOLE, {"type": "null"}]}, (1, None), ("x", True)),
    Case("oneOf", {"oneOf": [WHOLE, {"type": "null"}]}, (1, None), ("x", True)),
    Case(
        "oneOf/overlapping",
        {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 10}]},
        (-1, 11),
        (5,),
    ),
    Case("allOf", {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, (3, 5), (2, 6, "x")),
    Case("not", {"type": "integer", "not": {"const": 5}}, (4, 6), (5,)),
    Case("if", {"if": {"const": 1}, "then": {"type": "integer"}, "else": {"type": "string"}}, (1, "x"), (2, None)),
    Case("$ref", {"$ref": "#/$defs/n", "$defs": {"n": WHOLE}}, (1,), ("x",)),
    Case(
        "$ref/recursive",
        {
            "$ref": "#/$defs/t",
            "$defs": {
                "t": obj(v=WHOLE, next={"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]}, required=("v", "next"))
            },
        },
        ({"v": 1, "next": {"v": 2, "next": None}},),
        ({"v": 1, "next": {"v": "x", "next": None}}, {"v": 1, "next": 3}),
    ),
    Case("$defs", {"$defs": {"n": WHOLE}, "type": "array", "items": {"$ref": "#/$defs/n"}}, ([1],), (["x"],)),
    Case(
        "definitions",
        {"definitions": {"n": WHOLE}, "type": "array", "items": {"$ref": "#/definitions/n"}},
        ([1],),
        (["x"],),
    ),
    Case("$anchor", {"$ref": "#n", "$defs": {"n": {"$anchor": "n", "type": "integer"}}}, (1,), ("x",)),
    Case(
        "$dynamicRef",
        {"$dynamicRef": "#n", "$defs": {"n": {"$dynamicAnchor": "n", "type": "integer"}}},
        (1,),
        ("x",),
    ),
    Case(
        "$recursiveRef",
        {
            "$schema": "https://json-schema.org/draft/2019-09/schema",
            "type": "object",
            "additionalProperties": {"$recursiveRef": "#"},
        },
        ({}, {"a": {}}),
        ({"a": 1},),
    ),
)
