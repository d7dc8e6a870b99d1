"""A small vocabulary, so that grammars are tried without a model: bytes, words of JSON, and ends."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from cardan.grammar import GrammarVocabulary, Matcher
from cardan.grammar_spec import GrammarKind, GrammarSpec

EOS = 1
WORDS = ("true", "false", "null", '{"', '":', '", "', "name", " the", "ab", "abc", "tion", "2024", "hello", "\n\n")


class Words:
    """A tokenizer: the longest word that fits, else a byte."""

    def __init__(self) -> None:
        self.tokens = [b"<pad>", b"<end>", *(bytes([value]) for value in range(256)), *(w.encode() for w in WORDS)]
        self._ids = {token: index for index, token in enumerate(self.tokens) if index > 1}
        self._longest = max(map(len, self._ids))

    def encode(self, text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            length = next(n for n in range(min(self._longest, len(data)), 0, -1) if data[:n] in self._ids)
            ids.append(self._ids[data[:length]])
            data = data[length:]
        return ids

    def decode(self, ids: list[int]) -> str:
        return b"".join(self.tokens[index] for index in ids if index > 1).decode()


WORDS_TOKENIZER = Words()


def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(
        tokens=WORDS_TOKENIZER.tokens,
        eos_ids=frozenset({EOS}),
        special_ids=frozenset({0, EOS}),
        bos_id=None,
        encode=WORDS_TOKENIZER.encode,
    )


def spec(kind: GrammarKind | str, value: Any, **changes: Any) -> GrammarSpec:
    text = value if isinstance(value, str) else json.dumps(value)
    return GrammarSpec(kind=GrammarKind(kind), text=text, **changes)


def allowed(matcher: Any, num_tokens: int = len(WORDS_TOKENIZER.tokens)) -> set[int]:
    """Tokens of the mask, padding beyond the vocabulary included."""
    row = np.full(-(-num_tokens // 32) + 1, 0xFFFFFFFF, dtype=np.uint32)
    matcher.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def takes(matcher: Matcher, text: str) -> bool:
    """Whether a text is an output of the grammar, by the masks alone: each token and the end must be allowed."""
    for token in WORDS_TOKENIZER.encode(text):
        if token not in allowed(matcher) or not matcher.accept(token):
            return False
    return matcher.complete or EOS in allowed(matcher)
