"""Reads what requests write: fields of the native API and of OpenAI's, into one grammar.

It knows no HTTP body class; it is given plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cardan.errors import RequestError
from cardan.grammar_spec import GrammarKind, GrammarSpec

ANY_OBJECT = '{"type":"object"}'
"""The schema of OpenAI's ``json_object``."""

NATIVE_FIELDS = ("json_schema", "regex", "ebnf", "structural_tag", "choice")
"""Sampling parameters of the native API that are grammars."""

GUIDED_FIELDS: Mapping[str, GrammarKind] = {
    "json_schema": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "ebnf": GrammarKind.EBNF,
    "structural_tag": GrammarKind.STRUCTURAL_TAG,
    "choice": GrammarKind.CHOICE,
    "guided_json": GrammarKind.JSON_SCHEMA,
    "guided_regex": GrammarKind.REGEX,
    "guided_grammar": GrammarKind.EBNF,
    "guided_choice": GrammarKind.CHOICE,
}
"""Fields of OpenAI's routes beside ``response_format`` that are grammars; all are written as in the native API."""

_STRUCTURED: Mapping[str, GrammarKind] = {
    "json": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "choice": GrammarKind.CHOICE,
    "grammar": GrammarKind.EBNF,
    "structural_tag": GrammarKind.STRUCTURAL_TAG,
}
"""Fields of ``structured_outputs``."""


def read_fields(values: Mapping[str, Any], *, strict: bool = True) -> GrammarSpec | None:
    """The grammar that some fields ask for; those that are None ask for nothing.

    Args:
        values: by name: those of ``GUIDED_FIELDS``, ``response_format`` and ``structured_outputs``.
        strict: False takes schemas whose keywords are not all enforced.

    Raises:
        RequestError: a field has the wrong type, or more than one is given.
    """
    given = {name: value for name, value in values.items() if value is not None}
    found = [(name, spec) for name, value in given.items() if (spec := _read(name, value, strict)) is not None]
    if len(found) > 1:
        names = " and ".join(f"'{name}'" for name, _ in found)
        raise RequestError(
            f"{names} both constrain the output; at most one of them can. Drop the others.",
            param=found[1][0],
            code="conflicting_parameters",
        )
    return found[0][1] if found else None


def _read(name: str, value: Any, strict: bool) -> GrammarSpec | None:
    if name == "response_format":
        return _read_format(value, strict)
    if name == "structured_outputs":
        return _read_structured(value, strict)
    return read_one(name, GUIDED_FIELDS[name], value, strict=strict)


def read_one(name: str, kind: GrammarKind, value: Any, *, strict: bool = True) -> GrammarSpec:
    """A grammar from the value of one field.

    Raises:
        RequestError: it has the wrong type.
    """
    if kind in (GrammarKind.REGEX, GrammarKind.EBNF):
        if not isinstance(value, str) or not value:
            raise _wrong(name, "must be a text, not empty")
        return GrammarSpec(kind=kind, text=value)
    if kind is GrammarKind.CHOICE:
        if not isinstance(value, list | tuple) or not value:
            raise _wrong(name, "must be a list of at least one text")
        return GrammarSpec(kind=kind, text=_encode(name, list(value)))
    taken = dict if kind is GrammarKind.STRUCTURAL_TAG else dict | bool
    if isinstance(value, str) and value:
        return GrammarSpec(kind=kind, text=value, allow_unenforced=not strict)
    if not isinstance(value, taken):
        raise _wrong(name, "must be an object, or its JSON as a text")
    return GrammarSpec(kind=kind, text=_encode(name, value), allow_unenforced=not strict)


def _read_format(value: Any, strict: bool) -> GrammarSpec | None:
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "text":
            _only(value, "response_format", {"type"})
            return None
        case "json_object":
            _only(value, "response_format", {"type"})
            return GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text=ANY_OBJECT)
        case "json_schema":
            _only(value, "response_format", {"type", "json_schema"})
            return _read_json_schema(value.get("json_schema"), strict)
        case "structural_tag":
            return read_one("response_format", GrammarKind.STRUCTURAL_TAG, value, strict=strict)
    raise _wrong(
        "response_format",
        f"must be an object whose 'type' is text, json_object, json_schema or structural_tag, got {str(value)[:60]!r}",
    )


def _read_json_schema(value: Any, strict: bool) -> GrammarSpec:
    name = "response_format.json_schema"
    if not isinstance(value, dict) or "schema" not in value:
        raise _wrong(name, "must be an object with 'name' and 'schema'")
    _only(value, name, {"name", "description", "schema", "strict"})
    if not isinstance(value.get("name", ""), str) or not isinstance(value.get("description") or "", str):
        raise _wrong(name, "must have texts as 'name' and 'description'")
    asked = value.get("strict")
    if asked is not None and not isinstance(asked, bool):
        raise _wrong(f"{name}.strict", "must be true or false")
    schema = value["schema"]
    if not isinstance(schema, dict | bool):
        raise _wrong(f"{name}.schema", "must be a JSON schema (an object)")
    return read_one(f"{name}.schema", GrammarKind.JSON_SCHEMA, schema, strict=strict and asked is not False)


def _read_structured(value: Any, strict: bool) -> GrammarSpec | None:
    if not isinstance(value, dict):
        raise _wrong("structured_outputs", "must be an object")
    fields = {**_STRUCTURED, "json_object": None}
    _only(value, "structured_outputs", set(fields))
    given = {name: item for name, item in value.items() if item is not None and item is not False}
    if len(given) > 1:
        raise _wrong("structured_outputs", f"may have one entry, got {', '.join(sorted(given))}")
    for name, item in given.items():
        if name == "json_object":
            return GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text=ANY_OBJECT)
        return read_one(f"structured_outputs.{name}", _STRUCTURED[name], item, strict=strict)
    return None


def _only(value: Mapping[str, Any], name: str, known: set[str]) -> None:
    unknown = sorted(str(key) for key in value if key not in known)
    if unknown:
        raise RequestError(
            f"'{name}' has the unknown field {unknown[0][:60]!r}; known are {', '.join(sorted(known))}.",
            param=f"{name}.{unknown[0][:60]}",
            code="unknown_parameter",
        )


def _encode(name: str, value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError, UnicodeEncodeError) as error:
        raise _wrong(name, f"cannot be written as JSON: {error}") from None


def _wrong(name: str, what: str) -> RequestError:
    return RequestError(f"'{name}' {what}.", param=name, code="invalid_value")
