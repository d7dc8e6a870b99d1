"""The bytes that each token stands for, for the two ways in which vocabularies spell them.

It does not join tokens into text; that needs to know what came before (``detokenizer``).
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from tokenizers import Tokenizer as Backend

from cardan.errors import UnsupportedModelError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def _byte_alphabet() -> dict[int, int]:
    """Character to byte of GPT-2's alphabet: printable Latin-1 is itself, the rest follows from U+0100 on.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: byte for byte in printable}
    others = [byte for byte in range(256) if byte not in table]
    table.update({0x100 + offset: byte for offset, byte in enumerate(others)})
    return table


class TokenBytes:
    """Looks up the bytes of tokens, each worked out once.

    Attributes:
        byte_level: whether tokens are spelled in GPT-2's byte alphabet (else in SentencePiece's way).
        strips_space: whether the space that encoding puts before a text is taken away again.
    """

    def __init__(self, backend: Backend) -> None:
        """Read how ``backend`` spells its tokens.

        Raises:
            UnsupportedModelError: it is neither byte-level nor SentencePiece-like.
        """
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        self._added = {index: token.content for index, token in backend.get_added_tokens_decoder().items()}
        self.byte_level, self.strips_space = _spelling(backend)

    def __getitem__(self, token_id: int) -> bytes:
        """The token's bytes; none for an id that no token has."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._work_out(token_id)
        return known

    def _work_out(self, token_id: int) -> bytes:
        text = self._added.get(token_id)
        if text is None:
            text = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if text is None:
            return b""
        if self.byte_level:
            table = _byte_alphabet()
            if all(ord(char) in table for char in text):
                return bytes(table[ord(char)] for char in text)
            return text.encode()
        match = _BYTE.fullmatch(text)
        if match:
            return bytes([int(match[1], 16)])
        return text.replace("▁", " ").encode()


def _spelling(backend: Backend) -> tuple[bool, bool]:
    """Whether the vocabulary is byte-level, and whether decoding drops one leading space."""
    steps = _decoder_steps(backend)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return True, False
    spelled = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    spaces = any(
        step["type"] == "Metaspace" or (step["type"] == "Replace" and step["content"] == " ") for step in steps
    )
    if not spaces or not set(kinds) <= spelled:
        raise UnsupportedModelError(
            f"This tokenizer's decoder is {' + '.join(kinds) or 'missing'}; byte-level (ByteLevel) and SentencePiece "
            "(Replace, ByteFallback, Fuse, Strip, Metaspace) tokens can be turned into text. "
            "Pass --tokenizer FOLDER with a tokenizer.json of one of these kinds."
        )
    strips = any(
        (step["type"] == "Strip" and step["start"] > 0)
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )
    return False, strips


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    decoder = backend.decoder
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]
