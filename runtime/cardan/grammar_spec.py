"""What an output must match, as requests carry it through all processes.

It knows no backend; ``cardan.grammar`` compiles these.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class GrammarKind(enum.StrEnum):
    """How a grammar is written down."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """What an output must match.

    Attributes:
        kind: how ``text`` is to be read.
        text: the schema as JSON, the pattern, the rules, a JSON list of choices, or a structural tag as JSON.
        starts_after: token ids after which the grammar begins; before them everything but an end is allowed (a
            reasoning model's end of thinking). Empty for at once.
        allow_unenforced: take a JSON schema with keywords that the backend cannot enforce; they are not looked at.
    """

    kind: GrammarKind
    text: str
    starts_after: tuple[int, ...] = ()
    allow_unenforced: bool = False
