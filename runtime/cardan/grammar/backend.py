"""What a grammar backend is: a compiler of grammars over one vocabulary, and matchers that follow one output each.

It knows no library; ``GRAMMAR_BACKENDS`` names those that Cardan brings, and plugins add theirs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from cardan.grammar.keywords import KeywordTable
from cardan.grammar_spec import GrammarKind, GrammarSpec

MaskRow: TypeAlias = npt.NDArray[np.uint32]
MaskRows: TypeAlias = npt.NDArray[np.uint32]
"""One packed mask, ``uint32 [ceil(vocab / 32)]``: bit ``i % 32`` of word ``i / 32`` allows token ``i``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarVocabulary:
    """The tokens that grammars are compiled over.

    Attributes:
        tokens: the bytes of each id of the tokenizer; ids of the model beyond them are padding and never allowed.
        eos_ids: ids that end an output.
        special_ids: ids of special tokens, which are no text.
        bos_id: of the token that begins a text, or None.
        encode: text to ids, without special tokens.
    """

    tokens: Sequence[bytes]
    eos_ids: frozenset[int]
    special_ids: frozenset[int]
    bos_id: int | None
    encode: Callable[[str], list[int]]

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self.tokens)


class Matcher(Protocol):
    """Follows one output through a grammar."""

    @property
    def complete(self) -> bool:
        """Whether the output matches and nothing but an end can follow."""

    @property
    def error(self) -> str | None:
        """Why it can go no further (a limit of the backend), or None."""

    def accept(self, token: int) -> bool:
        """Take the next token. False, with the state as it was, where the grammar does not allow it."""

    def rollback(self, count: int) -> None:
        """Forget the last ``count`` tokens."""

    def fill(self, row: MaskRow) -> None:
        """Write the mask of the next token; bits beyond the vocabulary become 0."""

    def forced(self) -> list[int]:
        """Tokens that spell what must follow, where there is one way to go on; those that could be longer left out."""


@runtime_checkable
class ParallelMatcher(Protocol):
    """A matcher whose kind fills the masks of many at once, with several threads."""

    @classmethod
    def fill_many(cls, matchers: Sequence[Any], masks: MaskRows, rows: Sequence[int]) -> None:
        """Write the mask of each matcher, all of this kind, into its row of ``masks: uint32 [rows, words]``."""


class CompiledGrammar(Protocol):
    """A grammar that was compiled; threads may share it."""

    def matcher(self) -> Matcher:
        """A fresh matcher, before the first token."""


class GrammarBackend(Protocol):
    """Compiles grammars over one vocabulary."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a grammar; called in threads.

        Raises:
            RequestError: the grammar is wrong, too large, or not of the backend's dialect.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarOptions:
    """What is set for all grammars of a server.

    Attributes:
        any_whitespace: outputs of JSON schemas may have any white space between tokens, else none.
    """

    any_whitespace: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendKind:
    """A backend as it is chosen and described; making one imports its library.

    Attributes:
        make: makes it for a vocabulary.
        keywords: what it enforces of JSON Schema.
        module: what must be importable for it.
        install: how to install that.
        kinds: grammars that it takes.
        dialects: what its ``regex`` and ``ebnf`` are, for the documentation.
        spells_special_tokens: whether what stands around the spans of a structural tag may hold special tokens.
    """

    make: Callable[[GrammarVocabulary, GrammarOptions], GrammarBackend]
    keywords: KeywordTable
    module: str
    install: str
    kinds: frozenset[GrammarKind] = frozenset(GrammarKind)
    dialects: dict[GrammarKind, str] = field(default_factory=dict)
    spells_special_tokens: bool = False

    @property
    def installed(self) -> bool:
        """Whether its library is there; it is not imported."""
        return importlib.util.find_spec(self.module) is not None
