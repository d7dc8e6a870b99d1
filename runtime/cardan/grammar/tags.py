"""Structural tags: free text in which certain words begin a span that must match a schema.

It knows the form that requests have, and no backend's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from cardan.grammar.limits import refused_grammar
from cardan.grammar_spec import GrammarSpec

_EXPECTED = (
    "expected {'structures': [{'begin': '<f>', 'schema': {…}, 'end': '</f>'}], 'triggers': ['<f']}, "
    "with every 'begin' starting with one of the triggers"
)


@dataclass(frozen=True, slots=True)
class Tag:
    """One kind of span.

    Attributes:
        trigger: the text with which spans begin.
        begin: the same and what follows up to the schema's text.
        schema: what the span must match.
        end: what follows it.
    """

    trigger: str
    begin: str
    schema: Any
    end: str


def read_tags(spec: GrammarSpec) -> list[Tag]:
    """The tags of a grammar of kind ``structural_tag``.

    Raises:
        RequestError: they have another form.
    """
    value = msgspec.json.decode(spec.text)
    structures, triggers = value.get("structures"), value.get("triggers")
    lists = isinstance(structures, list) and isinstance(triggers, list)
    if not lists or not structures or not all(isinstance(item, str) and item for item in triggers):
        raise refused_grammar(spec, _EXPECTED)
    return [_read_tag(spec, item, triggers) for item in structures]


def _read_tag(spec: GrammarSpec, item: Any, triggers: list[str]) -> Tag:
    if not isinstance(item, dict):
        raise refused_grammar(spec, _EXPECTED)
    begin, end, schema = item.get("begin"), item.get("end"), item.get("schema", {})
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict | bool):
        raise refused_grammar(spec, _EXPECTED)
    trigger = next((one for one in triggers if begin.startswith(one)), None)
    if trigger is None:
        raise refused_grammar(spec, f"{begin[:40]!r} starts with none of the triggers; {_EXPECTED}")
    return Tag(trigger, begin, schema, end)


def tag_schemas(spec: GrammarSpec) -> list[Any]:
    """The schemas of a structural tag."""
    return [tag.schema for tag in read_tags(spec)]
