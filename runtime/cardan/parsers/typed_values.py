"""Gives untyped texts the JSON type that a function's schema asks for.

It checks no schema: a text that cannot have the type stays a text, so that nothing is lost.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping
from typing import Any

_TYPES = ("null", "boolean", "integer", "number", "array", "object")
"""JSON's types in the order in which they are tried; text is the last."""

_MAX_REFERENCES = 8
_MAX_NESTING = 64


def json_of(text: str, schema: Mapping[str, Any], name: str) -> str:
    """The JSON text of one argument.

    Args:
        text: as the model wrote it.
        schema: of the function's parameters.
        name: of the parameter.
    """
    wanted = types_of(schema, name)
    stripped = text.strip()
    for kind in _TYPES:
        if not wanted or kind in wanted:
            found = _READERS[kind](stripped)
            if found is not None:
                return found
    return json.dumps(text, ensure_ascii=False)


def types_of(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """Types that a parameter may have; empty when the schema does not say."""
    properties = schema.get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    if found is None:
        found = schema.get("additionalProperties")
    return frozenset(_types(found, schema, _MAX_REFERENCES))


def _types(part: object, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(part, Mapping) or depth == 0:
        return set()
    if isinstance(part.get("$ref"), str):
        return _types(_follow(part["$ref"], root), root, depth - 1)
    stated = part.get("type")
    if isinstance(stated, str):
        return {stated}
    if isinstance(stated, list):
        return {kind for kind in stated if isinstance(kind, str)}
    if isinstance(part.get("enum"), list):
        return {_type_of(value) for value in part["enum"]}
    if "const" in part:
        return {_type_of(part["const"])}
    found: set[str] = set()
    for key in ("anyOf", "oneOf", "allOf"):
        branches = part.get(key)
        for branch in branches if isinstance(branches, list) else ():
            found |= _types(branch, root, depth - 1)
    return found


def _follow(reference: str, root: Mapping[str, Any]) -> object:
    """What a reference into the same schema names, or None."""
    found: object = root
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found if reference.startswith("#/") else None


def _type_of(value: object) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _null(text: str) -> str | None:
    return "null" if text in ("null", "None") else None


def _boolean(text: str) -> str | None:
    return text.lower() if text.lower() in ("true", "false") else None


def _integer(text: str) -> str | None:
    value = _literal(text)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return str(value) if type(value) is int else None


def _number(text: str) -> str | None:
    value = _literal(text)
    if type(value) is int:
        return str(value)
    return repr(value) if isinstance(value, float) and math.isfinite(value) else None


def _array(text: str) -> str | None:
    return _dumped(text, list, "[")


def _object(text: str) -> str | None:
    return _dumped(text, dict, "{")


def _dumped(text: str, kind: type, opening: str) -> str | None:
    if not text.startswith(opening) or text.count("[") + text.count("{") > _MAX_NESTING * 64:
        return None
    value = _literal(text)
    if value is None:
        value = _python_literal(text)
    if not isinstance(value, kind):
        return None
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # halves of surrogate pairs are no text
        return text
    except (TypeError, ValueError, RecursionError):
        return None


def _literal(text: str) -> Any:
    """A JSON value, or None."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _python_literal(text: str) -> Any:
    """A value that the model wrote as Python would, with single quotes or ``True``; or None."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _refuse(name: str) -> None:
    raise ValueError(name)


_READERS = {
    "null": _null,
    "boolean": _boolean,
    "integer": _integer,
    "number": _number,
    "array": _array,
    "object": _object,
}
