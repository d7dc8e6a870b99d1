"""Grammars by xgrammar: JSON schemas, regular expressions, GBNF rules, choices and structural tags.

It knows no request; the library, which brings torch, is imported when a backend is made.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from cardan.grammar.backend import BackendKind, GrammarOptions, GrammarVocabulary, MaskRow
from cardan.grammar.keywords import KeywordTable
from cardan.grammar.limits import read_choices, read_schema, refused_grammar
from cardan.grammar.tags import read_tags
from cardan.grammar_spec import GrammarKind, GrammarSpec

_MAX_ROLLBACK = -1
"""Tokens that can be taken back: all of them."""

KEYWORDS = KeywordTable(
    enforced=frozenset(
        {
            "$defs",
            "$ref",
            "additionalProperties",
            "anyOf",
            "const",
            "definitions",
            "enum",
            "exclusiveMaximum",
            "exclusiveMinimum",
            "format",
            "items",
            "maxItems",
            "maxLength",
            "maxProperties",
            "maximum",
            "minItems",
            "minLength",
            "minProperties",
            "minimum",
            "multipleOf",
            "pattern",
            "prefixItems",
            "properties",
            "propertyNames",
            "required",
            "type",
        }
    ),
    formats=frozenset({"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}),
    notes={
        "$ref": "within the same schema only",
        "const": "written without white space",
        "enum": "written without white space",
        "pattern": "must match the whole text",
        "properties": "outputs have them in the order of the schema",
        "required": "of properties that are declared",
    },
    requires_declared=True,
)


class XgrammarMatcher:
    """Follows one output."""

    def __init__(self, matcher: Any, vocabulary: GrammarVocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._words = np.zeros((1, -(-vocabulary.size // 32)), dtype=np.int32)
        self._filled = False

    @property
    def complete(self) -> bool:
        """Whether the output matches and nothing but an end can follow."""
        if self._matcher.is_terminated():
            return True
        if not self._matcher.is_completed():
            return False
        self._fill()
        allowed = np.flatnonzero(np.unpackbits(self._words.view(np.uint8), bitorder="little"))
        return set(allowed.tolist()) <= self._vocabulary.eos_ids

    @property
    def error(self) -> str | None:
        """Matchers of this library have no limits of their own."""
        return None

    def accept(self, token: int) -> bool:
        """Take the next token. False, with the state as it was, where the grammar does not allow it."""
        if self._matcher.is_terminated():
            return False
        self._filled = False
        return bool(self._matcher.accept_token(token))

    def rollback(self, count: int) -> None:
        """Forget the last ``count`` tokens."""
        self._filled = False
        self._matcher.rollback(count)

    def fill(self, row: MaskRow) -> None:
        """Write the mask of the next token; bits beyond the vocabulary become 0."""
        self._fill()
        row[:] = 0
        row[: self._words.shape[1]] = self._words[0].view(np.uint32)

    def forced(self) -> list[int]:
        """Tokens that spell what must follow; the last is left out, since it might be longer."""
        if self._matcher.is_terminated():
            return []
        text = self._matcher.find_jump_forward_string()
        ids = self._vocabulary.encode(text)[:-1] if len(text) > 1 else []
        kept = 0
        for token in ids:
            if not self._matcher.accept_token(token):
                break
            kept += 1
        self._matcher.rollback(kept)
        return ids[:kept]

    def _fill(self) -> None:
        if self._filled:
            return
        if self._matcher.is_terminated():
            self._words[:] = 0
            for token in self._vocabulary.eos_ids:
                self._words.view(np.uint32)[0, token // 32] |= np.uint32(1 << token % 32)
        else:
            self._words[:] = -1
            self._matcher.fill_next_token_bitmask(self._words)
            tail = self._vocabulary.size % 32
            if tail:
                self._words.view(np.uint32)[0, -1] &= np.uint32((1 << tail) - 1)
        self._filled = True


class XgrammarGrammar:
    """A compiled grammar, shared by its matchers."""

    def __init__(self, library: Any, compiled: Any, vocabulary: GrammarVocabulary) -> None:
        self._library = library
        self._compiled = compiled
        self._vocabulary = vocabulary

    def matcher(self) -> XgrammarMatcher:
        """A fresh matcher."""
        made = self._library.GrammarMatcher(self._compiled, max_rollback_tokens=_MAX_ROLLBACK)
        return XgrammarMatcher(made, self._vocabulary)


class XgrammarBackend:
    """Compiles grammars over one vocabulary."""

    def __init__(self, vocabulary: GrammarVocabulary, options: GrammarOptions) -> None:
        import xgrammar

        self._library: Any = xgrammar
        self._vocabulary = vocabulary
        self._any_whitespace = options.any_whitespace
        special = vocabulary.special_ids | vocabulary.eos_ids
        info = self._library.TokenizerInfo(
            # Special tokens are no text; without bytes no grammar allows them.
            [b"" if index in special else token for index, token in enumerate(vocabulary.tokens)],
            vocab_type=self._library.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=sorted(vocabulary.eos_ids),
        )
        self._compiler = self._library.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, spec: GrammarSpec) -> XgrammarGrammar:
        """Compile a grammar.

        Raises:
            RequestError: the grammar is wrong.
        """
        try:
            compiled = self._compile(spec)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, ValueError) and hasattr(error, "param"):
                raise
            raise refused_grammar(spec, _explain(str(error))) from error
        return XgrammarGrammar(self._library, compiled, self._vocabulary)

    def _compile(self, spec: GrammarSpec) -> Any:
        match spec.kind:
            case GrammarKind.JSON_SCHEMA:
                schema = read_schema(spec)
                return self._compiler.compile_json_schema(
                    spec.text if isinstance(schema, dict) else "{}",
                    strict_mode=False,
                    any_whitespace=self._any_whitespace,
                )
            case GrammarKind.REGEX:
                return self._compiler.compile_regex(spec.text)
            case GrammarKind.CHOICE:
                quoted = (json.dumps(choice, ensure_ascii=False) for choice in read_choices(spec))
                return self._compiler.compile_grammar("root ::= " + " | ".join(quoted))
            case GrammarKind.EBNF:
                if "::=" not in spec.text:
                    raise refused_grammar(
                        spec, "this backend takes GBNF rules, which write ::=; Lark rules need the backend llguidance"
                    )
                return self._compiler.compile_grammar(spec.text)
            case GrammarKind.STRUCTURAL_TAG:
                return self._compiler.compile_structural_tag(self._tags(spec))

    def _tags(self, spec: GrammarSpec) -> dict[str, Any]:
        """The structural tag in the library's own form."""
        tags = read_tags(spec)
        content = [
            {
                "type": "tag",
                "begin": tag.begin,
                "content": {"type": "json_schema", "json_schema": tag.schema},
                "end": tag.end,
            }
            for tag in tags
        ]
        triggers = sorted({tag.trigger for tag in tags})
        return {
            "type": "structural_tag",
            "format": {"type": "triggered_tags", "triggers": triggers, "tags": content},
        }


def _explain(error: str) -> str:
    """The library's message without the place in its sources."""
    head, separator, rest = error.partition(": ")
    return rest if separator and ".cc" in head else error


def make(vocabulary: GrammarVocabulary, options: GrammarOptions) -> XgrammarBackend:
    """Make the backend; imports the library."""
    return XgrammarBackend(vocabulary, options)


KIND = BackendKind(
    make=make,
    keywords=KEYWORDS,
    module="xgrammar",
    install="pip install 'cardan[xgrammar]'",
    dialects={
        GrammarKind.REGEX: "xgrammar's regex syntax; the whole output matches",
        GrammarKind.EBNF: "GBNF, from the rule `root`",
    },
)
