"""Grammars by llguidance: JSON schemas, regular expressions, Lark and GBNF rules, choices and structural tags.

It knows no request; the library is imported when a backend is made.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cardan.grammar.backend import BackendKind, GrammarOptions, GrammarVocabulary, MaskRow, MaskRows
from cardan.grammar.keywords import KeywordTable
from cardan.grammar.limits import read_choices, read_schema, refused_grammar
from cardan.grammar.tags import read_tags
from cardan.grammar_spec import GrammarKind, GrammarSpec

if TYPE_CHECKING:
    import llguidance

KEYWORDS = KeywordTable(
    enforced=frozenset(
        {
            "$anchor",
            "$defs",
            "$ref",
            "additionalItems",
            "additionalProperties",
            "allOf",
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
            "oneOf",
            "pattern",
            "patternProperties",
            "prefixItems",
            "properties",
            "required",
            "type",
        }
    ),
    formats=frozenset(
        {
            "date",
            "date-time",
            "duration",
            "email",
            "hostname",
            "ipv4",
            "ipv6",
            "time",
            "uri",
            "uuid",
        }
    ),
    notes={
        "$ref": "within the same schema only",
        "oneOf": "alternatives must exclude each other, or the schema is refused",
        "pattern": "no look-around and no back-references",
        "properties": "outputs have them in the order of the schema",
    },
    approximate=frozenset({"oneOf"}),
)


@functools.cache
def _executor() -> llguidance.LLExecutor:
    """The threads that fill masks."""
    import llguidance

    return llguidance.LLExecutor()


class LlguidanceMatcher:
    """Follows one output.

    Attributes:
        inner: the library's.
        words: of a mask.
    """

    def __init__(self, matcher: llguidance.LLMatcher, words: int) -> None:
        self.inner = matcher
        self.words = words

    @property
    def complete(self) -> bool:
        """Whether the output matches and nothing but an end can follow."""
        return self.inner.is_stopped() and not self.inner.is_error()

    @property
    def error(self) -> str | None:
        """Which limit was hit, or None."""
        return first_line(self.inner.get_error()) if self.inner.is_error() else None

    def accept(self, token: int) -> bool:
        """Take the next token. False, with the state as it was, where the grammar does not allow it."""
        return bool(self.inner.try_consume_tokens([token]))

    def rollback(self, count: int) -> None:
        """Forget the last ``count`` tokens."""
        self.inner.rollback(count)

    def fill(self, row: MaskRow) -> None:
        """Write the mask of the next token; bits beyond the vocabulary become 0."""
        row[:] = 0
        self.inner.unsafe_compute_mask_ptr(row.ctypes.data, self.words * row.itemsize)

    @classmethod
    def fill_many(cls, matchers: Sequence[LlguidanceMatcher], masks: MaskRows, rows: Sequence[int]) -> None:
        """Write the masks of many, with as many threads as there are processors."""
        words = matchers[0].words
        # Rows of the model may be wider than those of the tokenizer, which is all that the library fills.
        filled = np.zeros((len(matchers), words), dtype=np.uint32)
        pairs = [(matcher.inner, index) for index, matcher in enumerate(matchers)]
        _executor().unsafe_compute_mask_ptr(pairs, filled.ctypes.data, words * filled.itemsize, len(matchers))
        index = np.asarray(rows)
        masks[index] = 0
        masks[index, :words] = filled

    def forced(self) -> list[int]:
        """Tokens that spell what must follow, where there is one way to go on."""
        return self.inner.compute_ff_tokens()


class LlguidanceGrammar:
    """A compiled grammar: a matcher that is copied for each output."""

    def __init__(self, template: llguidance.LLMatcher, words: int) -> None:
        self._template = template
        self._words = words

    def matcher(self) -> LlguidanceMatcher:
        """A fresh matcher."""
        return LlguidanceMatcher(self._template.deep_copy(), self._words)


class LlguidanceBackend:
    """Compiles grammars over one vocabulary."""

    def __init__(self, vocabulary: GrammarVocabulary, options: GrammarOptions) -> None:
        import llguidance

        self._library = llguidance
        self._vocabulary = vocabulary
        self._any_whitespace = options.any_whitespace
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(vocabulary)),
            n_vocab=vocabulary.size,
            eos_token=sorted(vocabulary.eos_ids),
        )

    def compile(self, spec: GrammarSpec) -> LlguidanceGrammar:
        """Compile a grammar, and try its first mask.

        Raises:
            RequestError: the grammar is wrong, too complex, or matches nothing.
        """
        text = self._translate(spec)
        matcher = self._library.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise refused_grammar(spec, _explain(matcher.get_error()))
        words = -(-self._vocabulary.size // 32)
        grammar = LlguidanceGrammar(matcher, words)
        row = np.zeros(words, dtype=np.uint32)
        tried = grammar.matcher()
        tried.fill(row)
        if tried.error is not None:
            reason = tried.error
            raise refused_grammar(spec, "no output can match it" if "NoExtension" in reason else reason)
        return grammar

    def _translate(self, spec: GrammarSpec) -> str:
        build = self._library.LLMatcher
        match spec.kind:
            case GrammarKind.JSON_SCHEMA:
                options: Any = self._schema_options(spec)
                schema = read_schema(spec)
                text = spec.text if isinstance(schema, dict) else "{}"
                return build.grammar_from_json_schema(text, None, options)
            case GrammarKind.REGEX:
                return build.grammar_from_regex(unanchored(spec.text))
            case GrammarKind.CHOICE:
                quoted = (json.dumps(choice, ensure_ascii=False) for choice in read_choices(spec))
                # One word of many forms; as alternatives of a rule, each would take a place in the parser's table.
                return build.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(quoted))
            case GrammarKind.EBNF:
                return build.grammar_from_lark(self._rules(spec))
            case GrammarKind.STRUCTURAL_TAG:
                return build.grammar_from_lark(self._tags(spec))

    def _schema_options(self, spec: GrammarSpec) -> dict[str, Any]:
        return {
            "whitespace_flexible": self._any_whitespace,
            "lenient": spec.allow_unenforced,
            "coerce_one_of": spec.allow_unenforced,
        }

    def _rules(self, spec: GrammarSpec) -> str:
        """Lark rules; GBNF, which writes ``::=``, is translated."""
        if "::=" not in spec.text:
            return spec.text
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            return any_to_lark(spec.text)
        except RecursionError:
            raise refused_grammar(spec, "the rules are nested too deeply") from None
        except Exception as error:
            raise refused_grammar(spec, f"the GBNF rules cannot be read: {error}") from error

    def _tags(self, spec: GrammarSpec) -> str:
        """Lark rules of a structural tag: lazy words end free text where a trigger does."""
        options = self._schema_options(spec)
        tags = read_tags(spec)
        lines = [
            "start: (" + " | ".join(f"tag_{index}" for index in range(len(tags))) + ")* TEXT",
            r"TEXT: /(.|\n)*/",
        ]
        for index, tag in enumerate(tags):
            rest = self._spell(tag.begin[len(tag.trigger) :])
            asked = tag.schema if isinstance(tag.schema, dict) else {}
            schema = json.dumps({**asked, "x-guidance": options})
            body = f"{rest} %json {schema} {self._spell(tag.end)}"
            if self._begins_special(spec, tag.trigger):
                # No text allows a special token, so what stands before one needs no end of its own.
                lines.append(f"tag_{index}: TEXT {self._spell(tag.trigger)} {body}")
            else:
                lines.append(f"open_{index}[lazy]: TEXT {_literal(tag.trigger)}")
                lines.append(f"tag_{index}: open_{index} {body}")
        return "\n".join(lines) + "\n"

    @functools.cached_property
    def _special_ids(self) -> dict[str, int]:
        """Ids of special tokens by their text."""
        tokens = self._vocabulary.tokens
        special = self._vocabulary.special_ids - self._vocabulary.eos_ids
        ids = {tokens[token].decode(errors="replace"): token for token in special}
        return {text: token for text, token in ids.items() if text}

    @functools.cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        """Any special token, the longest first; without any it matches nothing."""
        marks = sorted(self._special_ids, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, marks)) + ")" if marks else r"(?!)")

    def _begins_special(self, spec: GrammarSpec, trigger: str) -> bool:
        """Whether a trigger begins with a special token; behind text it can have none."""
        if self._special_pattern.match(trigger):
            return True
        later = self._special_pattern.search(trigger)
        if later is not None:
            raise refused_grammar(
                spec,
                f"the trigger {trigger[:80]!r} has the special token {later[0]!r} behind text. Expected triggers that "
                "begin with a special token or hold none; take what stands before it, or it alone, as the trigger",
            )
        return False

    def _spell(self, text: str) -> str:
        """A text as rules write it; special tokens in it are no text to the grammar, and stand there by their ids."""
        ids = self._special_ids
        parts = self._special_pattern.split(text)
        return " ".join(f"<[{ids[part]}]>" if part in ids else _literal(part) for part in parts if part)


class _Tokens:
    """The vocabulary in the form that the library reads."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.eos_token_id = min(vocabulary.eos_ids, default=0)
        self.bos_token_id = vocabulary.bos_id
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = sorted(vocabulary.special_ids)
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # the library tries whether bytes are taken
            raise TypeError("text is expected")
        return self._encode(text)


def unanchored(pattern: str) -> str:
    """A pattern without ``^`` and ``$`` around it: the whole output must match anyway."""
    pattern = pattern.removeprefix("^")
    escapes = len(pattern) - 1 - len(pattern[:-1].rstrip("\\"))
    return pattern[:-1] if pattern.endswith("$") and escapes % 2 == 0 else pattern


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def first_line(text: str) -> str:
    """What an error says before it repeats the grammar or its state."""
    return text.split("\n<", 1)[0].strip()


def _explain(error: str) -> str:
    head = first_line(error)
    if "lexer precomputation failed" in head:
        return "it is too complex to prepare; write it with fewer repetitions"
    return head.split("\n   1 |", 1)[0]


def make(vocabulary: GrammarVocabulary, options: GrammarOptions) -> LlguidanceBackend:
    """Make the backend; imports the library."""
    return LlguidanceBackend(vocabulary, options)


KIND = BackendKind(
    make=make,
    keywords=KEYWORDS,
    module="llguidance",
    install="pip install llguidance",
    spells_special_tokens=True,
    dialects={
        GrammarKind.REGEX: "Rust's regex syntax; the whole output matches; no look-around, no back-references",
        GrammarKind.EBNF: "Lark (llguidance's variant, from the rule `start`), or GBNF where `::=` is written",
    },
)
