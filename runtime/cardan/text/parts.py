"""What a tokenizer is made of once its files have been read, whatever kind of files they were.

It does not know how the files were laid out, and does no work of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

CHAT_END_TOKENS: tuple[str, ...] = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|eot|>",
    "<|end_of_turn|>",
    "<turn|>",
)
"""Tokens with which chat templates end a turn."""


class TokenizerFiles(Protocol):
    """Where a tokenizer's data is: exactly one of the two is given.

    ``cardan.weights.TokenizerSource`` has this shape.
    """

    @property
    def folder(self) -> Path | None:
        """A folder with ``tokenizer.json`` and what belongs to it."""

    @property
    def gguf(self) -> Mapping[str, Any] | None:
        """Raw metadata of a GGUF file, key to value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """A tokenizer's library object and what its files say around it.

    Attributes:
        backend: the ``tokenizers`` object, special tokens and post-processor set.
        special_tokens: ``bos_token``, ``eos_token`` … to their text, as chat templates see them.
        bos_id: id of the token a text begins with, or None.
        eos_ids: ids that the files name as ends of a text.
        templates: chat templates by name; ``default`` is the usual one.
        origin: where the templates came from, for messages of errors.
    """

    backend: Backend
    special_tokens: Mapping[str, str]
    bos_id: int | None
    eos_ids: frozenset[int]
    templates: Mapping[str, str] = field(default_factory=dict)
    origin: str = "the model"


def chat_end_ids(backend: Backend, template: str | None) -> frozenset[int]:
    """Ids of the tokens that end a turn in ``template``.

    ``<|end|>`` is left out where the template also uses channels: there it ends a message, not the turn.
    """
    if template is None:
        return frozenset()
    found: set[int] = set()
    for text in CHAT_END_TOKENS:
        token_id = backend.token_to_id(text)
        if token_id is None or text not in template or (text == "<|end|>" and "<|channel|>" in template):
            continue
        found.add(token_id)
    return frozenset(found)
