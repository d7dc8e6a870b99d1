"""Which keywords of JSON Schema a grammar backend enforces, and what a schema asks for beyond them.

It knows no backend's library: each brings a table, and a schema is walked against it before anything is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

ANNOTATIONS = frozenset(
    {
        "$comment",
        "$id",
        "$schema",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)
"""Keywords that describe and constrain nothing; names that begin with ``x-`` do so too."""

STANDARD = frozenset(
    {
        "$anchor", "$defs", "$dynamicRef", "$recursiveRef", "$ref", "additionalItems", "additionalProperties", "allOf",
        "anyOf", "const", "contains", "definitions", "dependencies", "dependentRequired", "dependentSchemas", "else",
        "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "if", "items", "maxContains", "maxItems",
        "maxLength", "maxProperties", "maximum", "minContains", "minItems", "minLength", "minProperties", "minimum",
        "multipleOf", "not", "oneOf", "pattern", "patternProperties", "prefixItems", "properties", "propertyNames",
        "required", "then", "type", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
    }
)  # fmt: skip
"""Keywords of JSON Schema, drafts 7 to 2020-12, that constrain."""

_ONE = frozenset(
    {
        "additionalItems",
        "additionalProperties",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
_MANY = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})


@dataclass(frozen=True, slots=True, kw_only=True)
class KeywordTable:
    """What a backend enforces.

    Attributes:
        enforced: keywords that hold in every output.
        formats: values of ``format`` that it enforces.
        notes: for a keyword, what is different from the standard.
        requires_declared: ``required`` holds for names under ``properties`` only.
        approximate: keywords that it enforces, but drops in part where a request takes schemas that are not enforced.
    """

    enforced: frozenset[str]
    formats: frozenset[str]
    notes: Mapping[str, str] = field(default_factory=dict)
    requires_declared: bool = False
    approximate: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Unenforced:
    """A keyword that a backend would not look at.

    Attributes:
        name: the keyword; formats are ``format: NAME``.
        path: where it stands, as a JSON pointer.
    """

    name: str
    path: str


def unenforced_keywords(schema: Any, table: KeywordTable) -> list[Unenforced]:
    """Keywords of a schema that a backend does not enforce, each where it stands first."""
    found: dict[str, Unenforced] = {}
    for path, part in _parts(schema):
        for name, value in part.items():
            missing = _missing(name, value, table)
            if missing is not None:
                found.setdefault(missing, Unenforced(missing, f"{path}/{name}"))
        if table.requires_declared and _requires_undeclared(part):
            name = "required of undeclared properties"
            found.setdefault(name, Unenforced(name, f"{path}/required"))
    return list(found.values())


def uses_keyword(schema: Any, names: frozenset[str]) -> list[str]:
    """Those of some keywords that a schema uses, sorted."""
    return sorted({name for _, part in _parts(schema) for name in part if name in names})


def _missing(name: str, value: Any, table: KeywordTable) -> str | None:
    if name in ANNOTATIONS or (name.startswith("x-") and name != "x-guidance"):
        return None
    if name == "format" and name in table.enforced:
        return None if isinstance(value, str) and value in table.formats else f"format: {str(value)[:40]}"
    if name in table.enforced or _asks_nothing(name, value):
        return None
    return name[:60]


def _requires_undeclared(part: dict[str, Any]) -> bool:
    required, declared = part.get("required"), part.get("properties")
    names = declared.keys() if isinstance(declared, dict) else ()
    return isinstance(required, list) and any(not isinstance(name, str) or name not in names for name in required)


def _asks_nothing(name: str, value: Any) -> bool:
    """Values that a schema states only for the sake of completeness."""
    return (name == "uniqueItems" and value is False) or (name == "nullable" and value is False)


def _parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema object within a schema, with its path."""
    pending: list[tuple[str, Any]] = [("", schema)]
    while pending:
        path, part = pending.pop()
        if not isinstance(part, dict):
            continue
        yield path, part
        for name, value in part.items():
            where = f"{path}/{name}"
            if name in _MANY and isinstance(value, list):
                pending += [(f"{where}/{index}", item) for index, item in enumerate(value)]
            elif name in _ONE:
                pending.append((where, value))
            elif name in _NAMED and isinstance(value, dict):
                pending += [(f"{where}/{key}", item) for key, item in value.items()]
