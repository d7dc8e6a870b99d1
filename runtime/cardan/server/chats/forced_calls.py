"""Grammars that make a model call: at least one function, a certain one, or arguments that fit their schema.

It compiles none, and does not know how a model writes calls by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cardan.errors import RequestError
from cardan.grammar_spec import GrammarKind, GrammarSpec
from cardan.parsers import ToolFormat
from cardan.server.http.bodies import shorten
from cardan.server.openai.tools import ToolUse

_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def forced_grammar(tools: ToolUse, *, parallel: bool) -> GrammarSpec:
    """What an answer must be that has to call: a JSON array of calls, or one object where the function is named.

    ``cardan.parsers.ForcedCallsParser`` reads it, whatever the model's own format is.

    Args:
        tools: the functions; ``mode`` is ``required`` or ``named``.
        parallel: whether there may be more than one call.

    Raises:
        RequestError: arguments of a function could not be an object.
    """
    names = [tools.name] if tools.name is not None else list(tools.schemas or {})
    definitions: dict[str, Any] = {}
    calls = [_call(name, (tools.schemas or {})[name], definitions) for name in names]
    if tools.mode == "named":
        schema = calls[0]
    else:
        schema = {"type": "array", "minItems": 1, "items": calls[0] if len(calls) == 1 else {"anyOf": calls}}
        if not parallel:
            schema["maxItems"] = 1
    if definitions:
        schema = {**schema, "$defs": definitions}
    return GrammarSpec(
        kind=GrammarKind.JSON_SCHEMA,
        text=msgspec.json.encode(schema).decode(),
        allow_unenforced=not tools.strict & set(names),
    )


def strict_grammar(tools: ToolUse, form: ToolFormat) -> GrammarSpec:
    """Free text in which every call has arguments that fit its function's schema.

    Args:
        tools: the functions.
        form: how the model writes calls; it has frames.

    Raises:
        RequestError: arguments of a strict function could not be an object.
    """
    assert form.frames is not None, "a format without frames holds no calls"
    structures = []
    for function, schema in (tools.schemas or {}).items():
        held = _arguments(function, schema) if function in tools.strict else {"type": "object"}
        structures += [{"begin": begin, "schema": held, "end": end} for begin, end in form.frames(function)]
    tags = {"structures": structures, "triggers": list(form.triggers or form.starts)}
    return GrammarSpec(kind=GrammarKind.STRUCTURAL_TAG, text=msgspec.json.encode(tags).decode())


def _arguments(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """What a function's arguments must be: an object, also where its schema allows others as well."""
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise RequestError(
            f"The parameters of the function '{name}' have the type {shorten(str(kind))!r}, and arguments are always "
            "an object. Describe one, with the value as a property.",
            param="tools",
            code="invalid_value",
        )
    return {**schema, "type": "object"} if schema else _NO_ARGUMENTS


def _call(name: str, schema: Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    arguments = _arguments(name, schema)
    if _refers(arguments):
        # References lead from the root, which is no longer the function's own schema.
        key = f"arguments{len(definitions)}"
        definitions[key] = _moved(arguments, f"#/$defs/{key}")
        arguments = {"$ref": f"#/$defs/{key}"}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _refers(part: Any) -> bool:
    if isinstance(part, Mapping):
        return "$ref" in part or any(_refers(value) for value in part.values())
    return isinstance(part, list) and any(_refers(item) for item in part)


def _moved(part: Any, root: str) -> Any:
    """A schema whose references lead from another place."""
    if isinstance(part, list):
        return [_moved(item, root) for item in part]
    if not isinstance(part, Mapping):
        return part
    moved = {key: _moved(value, root) for key, value in part.items()}
    reference = part.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved
