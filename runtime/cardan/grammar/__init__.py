"""Output that must match a grammar: what requests may ask, backends that compile it, and the masks of each step.

It knows no request queue, no device and no HTTP. Backends' libraries are imported where masks are made, nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cardan.errors import ConfigError
from cardan.grammar import llguidance_backend, xgrammar_backend
from cardan.grammar.backend import (
    BackendKind,
    CompiledGrammar,
    GrammarBackend,
    GrammarOptions,
    GrammarVocabulary,
    Matcher,
)
from cardan.grammar.compiler import GrammarCompiler
from cardan.grammar.keywords import KeywordTable, Unenforced, unenforced_keywords, uses_keyword
from cardan.grammar.limits import check_spec, read_schema, refused_grammar
from cardan.grammar.masks import MaskBuffers
from cardan.grammar.session import FreeMask, GrammarSession
from cardan.grammar.tags import tag_schemas
from cardan.grammar_spec import GrammarKind, GrammarSpec

GRAMMAR_BACKENDS: dict[str, BackendKind] = {
    "llguidance": llguidance_backend.KIND,
    "xgrammar": xgrammar_backend.KIND,
}
"""Backends by name, the one preferred by ``auto`` first; plugins add theirs."""

NO_BACKEND = "none"

__all__ = [
    "GRAMMAR_BACKENDS",
    "NO_BACKEND",
    "BackendKind",
    "CompiledGrammar",
    "FreeMask",
    "GrammarBackend",
    "GrammarCompiler",
    "GrammarOptions",
    "GrammarSession",
    "GrammarVocabulary",
    "KeywordTable",
    "MaskBuffers",
    "Matcher",
    "Unenforced",
    "check_grammar",
    "choose_backend",
    "spells_special_tokens",
    "takes_kind",
    "unenforced_names",
]


def choose_backend(asked: str, kinds: Mapping[str, BackendKind] | None = None) -> tuple[str, str]:
    """The backend that ``--grammar-backend`` means.

    Returns:
        Its name, or ``none``, and why.

    Raises:
        ConfigError: there is no such backend, or its library is not installed.
    """
    known = GRAMMAR_BACKENDS if kinds is None else kinds
    if asked == NO_BACKEND:
        return NO_BACKEND, "--grammar-backend"
    if asked == "auto":
        found = next((name for name, kind in known.items() if kind.installed), None)
        if found is None:
            return NO_BACKEND, "none of the libraries " + ", ".join(known) + " is installed"
        return found, "the first that is installed"
    if asked not in known:
        raise ConfigError(f"--grammar-backend must be one of auto, {', '.join(known)}, none, got {asked!r}.")
    if not known[asked].installed:
        raise ConfigError(
            f"--grammar-backend {asked} needs the module {known[asked].module!r}, which is not installed. "
            f"Run: {known[asked].install}."
        )
    return asked, "--grammar-backend"


def check_grammar(spec: GrammarSpec, backend: str) -> None:
    """Check a grammar before it is sent on: its form, its size, and what the backend enforces of a schema.

    Raises:
        RequestError: it is wrong, or the backend would not look at all of it.
    """
    if backend == NO_BACKEND:
        raise refused_grammar(
            spec, "this server has no grammar backend (--grammar-backend); start it with one, or drop the field"
        )
    kind = GRAMMAR_BACKENDS[backend]
    if spec.kind not in kind.kinds:
        known = ", ".join(sorted(kind.kinds))
        raise refused_grammar(spec, f"backend {backend} takes {known}")
    check_spec(spec)
    if spec.allow_unenforced:
        return
    for schema in _schemas(spec):
        missing = unenforced_keywords(schema, kind.keywords)
        if missing:
            listed = "; ".join(f"{one.name} (at {one.path})" for one in missing[:8])
            raise refused_grammar(
                spec,
                f"these keywords cannot be enforced by backend {backend}: {listed}. Take them out, or allow them to "
                'go unenforced ("strict": false)',
            )


def spells_special_tokens(backend: str) -> bool:
    """Whether special tokens may stand around the spans of a structural tag."""
    return backend in GRAMMAR_BACKENDS and GRAMMAR_BACKENDS[backend].spells_special_tokens


def takes_kind(kind: GrammarKind, backend: str) -> bool:
    """Whether a backend takes grammars of a kind; none is taken without a backend."""
    return backend in GRAMMAR_BACKENDS and kind in GRAMMAR_BACKENDS[backend].kinds


def unenforced_names(spec: GrammarSpec | None, backend: str) -> tuple[str, ...]:
    """Keywords of a request's schemas that are not looked at, because the request allows that."""
    if spec is None or not spec.allow_unenforced or backend not in GRAMMAR_BACKENDS:
        return ()
    table = GRAMMAR_BACKENDS[backend].keywords
    names: set[str] = set()
    for schema in _schemas(spec):
        names.update(one.name for one in unenforced_keywords(schema, table))
        names.update(uses_keyword(schema, table.approximate))
    return tuple(sorted(names))


def _schemas(spec: GrammarSpec) -> list[Any]:
    if spec.kind is GrammarKind.JSON_SCHEMA:
        return [read_schema(spec)]
    return tag_schemas(spec) if spec.kind is GrammarKind.STRUCTURAL_TAG else []
