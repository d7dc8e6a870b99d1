"""Limits of a grammar's text, checked before any compiler sees it: size, nesting, counts.

It knows no backend. What is refused here could crash or stall one.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from cardan.errors import RequestError
from cardan.grammar_spec import GrammarKind, GrammarSpec

MAX_GRAMMAR_CHARS = 262_144
"""Longest text of a grammar."""
MAX_NESTING = 64
"""Deepest nesting of a schema, and of parentheses in patterns and rules."""
MAX_RULES = 1000
"""Most rules, and most names under ``$defs`` of a schema: backends resolve chains of them recursively."""
MAX_PROPERTIES = 1000
"""Most properties of one object: masks take time with each of them."""
MAX_REPEATS = 10_000
"""Most forced repetitions: the product of the least counts of ``{n}`` that may stand within each other."""
MAX_CHOICES = 10_000
"""Most choices, and most values of an ``enum``."""
MAX_START_TOKENS = 16
"""Most tokens after which a grammar begins."""

_COUNT = re.compile(r"\{(\d+)(?:,\d*)?\}")
_PARAM = {kind: str(kind) for kind in GrammarKind}


def check_spec(spec: GrammarSpec) -> None:
    """Check the form and the size of a grammar.

    Raises:
        RequestError: it is malformed or too large.
    """
    if not spec.text:
        raise _wrong(spec, "is empty")
    if len(spec.text) > MAX_GRAMMAR_CHARS:
        raise _wrong(spec, f"has {len(spec.text)} characters, at most {MAX_GRAMMAR_CHARS} are taken")
    if len(spec.starts_after) > MAX_START_TOKENS:
        raise _wrong(spec, f"begins after {len(spec.starts_after)} tokens, at most {MAX_START_TOKENS} are taken")
    try:
        spec.text.encode()
    except UnicodeEncodeError:
        raise _wrong(spec, "holds half of a surrogate pair; send valid Unicode") from None
    _CHECKS[spec.kind](spec)


def read_schema(spec: GrammarSpec) -> Any:
    """The JSON schema of a grammar.

    Raises:
        RequestError: it is no JSON, or neither an object nor a boolean.
    """
    schema = _json(spec)
    if not isinstance(schema, dict | bool):
        raise _wrong(spec, f"must be a JSON schema (an object), got {type(schema).__name__}")
    return schema


def read_choices(spec: GrammarSpec) -> list[str]:
    """The choices of a grammar.

    Raises:
        RequestError: they are no list of different texts.
    """
    choices = _json(spec)
    if not isinstance(choices, list) or not choices or not all(isinstance(item, str) and item for item in choices):
        raise _wrong(spec, "must be a list of at least one text, none of them empty")
    if len(choices) > MAX_CHOICES:
        raise _wrong(spec, f"has {len(choices)} entries, at most {MAX_CHOICES} are taken")
    return choices


def _check_schema(spec: GrammarSpec) -> None:
    schema = read_schema(spec)
    if schema is False:
        raise _wrong(spec, "is false, which no output can match")
    check_schema(spec, schema)


def check_schema(spec: GrammarSpec, schema: Any) -> None:
    """Check the size of a schema, wherever it stands in a grammar.

    Raises:
        RequestError: it is nested too deeply or too wide.
    """
    pending: list[tuple[Any, int]] = [(schema, 1)]
    while pending:
        value, depth = pending.pop()
        if depth > MAX_NESTING:
            raise _wrong(spec, f"is nested deeper than {MAX_NESTING} levels; use $ref for recursion")
        if isinstance(value, dict):
            if len(value) > MAX_PROPERTIES:
                raise _wrong(spec, f"has an object of {len(value)} entries, at most {MAX_PROPERTIES} are taken")
            pending += [(item, depth + 1) for item in value.values()]
            if isinstance(pattern := value.get("pattern"), str):
                _check_pattern(spec, pattern)
        elif isinstance(value, list):
            if len(value) > MAX_CHOICES:
                raise _wrong(spec, f"has a list of {len(value)} entries, at most {MAX_CHOICES} are taken")
            pending += [(item, depth + 1) for item in value]


def _check_regex(spec: GrammarSpec) -> None:
    _check_pattern(spec, spec.text)


def _check_pattern(spec: GrammarSpec, text: str) -> None:
    depth = deepest = 0
    repeats = 1
    for match in _COUNT.finditer(text):
        repeats = min(repeats * max(int(match[1][:6]), 1), MAX_REPEATS + 1)
    for char in text:
        depth += (char in "([") - (char in ")]")
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise _wrong(spec, f"has parentheses nested deeper than {MAX_NESTING} levels")
    if repeats > MAX_REPEATS:
        raise _wrong(spec, f"repeats more than {MAX_REPEATS} times: the counts in {{}}, multiplied")


def _check_rules(spec: GrammarSpec) -> None:
    _check_pattern(spec, spec.text)
    rules = sum(1 for line in spec.text.splitlines() if ":" in line)
    if rules > MAX_RULES:
        raise _wrong(spec, f"has {rules} rules, at most {MAX_RULES} are taken")


def _check_choices(spec: GrammarSpec) -> None:
    read_choices(spec)


def _check_tag(spec: GrammarSpec) -> None:
    tag = _json(spec)
    if not isinstance(tag, dict):
        raise _wrong(spec, "must be an object with 'structures' and 'triggers'")
    check_schema(spec, tag)


_CHECKS = {
    GrammarKind.JSON_SCHEMA: _check_schema,
    GrammarKind.REGEX: _check_regex,
    GrammarKind.EBNF: _check_rules,
    GrammarKind.CHOICE: _check_choices,
    GrammarKind.STRUCTURAL_TAG: _check_tag,
}


def _json(spec: GrammarSpec) -> Any:
    try:
        return msgspec.json.decode(spec.text)
    except RecursionError:
        raise _wrong(spec, f"is nested deeper than {MAX_NESTING} levels; use $ref for recursion") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _wrong(spec, f"is not valid JSON: {error}") from None


def _wrong(spec: GrammarSpec, what: str) -> RequestError:
    return RequestError(f"The grammar ({spec.kind}) {what}.", param=_PARAM[spec.kind], code="invalid_grammar")


def refused_grammar(spec: GrammarSpec, reason: str) -> RequestError:
    """The error for a grammar that a backend refuses."""
    return _wrong(spec, "is refused: " + " ".join(reason.split())[:600].rstrip("."))
