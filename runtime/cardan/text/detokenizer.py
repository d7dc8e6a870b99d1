"""Turns tokens into text as they come, holding back only bytes that are not a whole character yet.

It does not know stop conditions, and never looks at a token twice.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable

from cardan.text.token_bytes import TokenBytes

_LONE_BYTES = re.compile("[\udc80-\udcff]")


class Detokenizer:
    """Text of one sequence of tokens, piece by piece; the pieces joined are the text of the whole.

    Each token costs its own bytes, however long the sequence is. At most three bytes are held back,
    since no character has more than four: bytes that can never become a character are replaced by
    U+FFFD at once.
    """

    __slots__ = ("_at_start", "_bytes", "_decoder", "_skipped")

    def __init__(self, tokens: TokenBytes, *, skipped: frozenset[int] = frozenset(), continues: bool = False) -> None:
        """Start a text.

        Args:
            tokens: bytes of each token.
            skipped: ids that give no text (the special tokens, usually).
            continues: the text goes on from a prompt, so that a leading space belongs to it. Otherwise the
                space that SentencePiece puts before a text is dropped.
        """
        self._bytes = tokens
        self._skipped = skipped
        # Invalid bytes count one by one in SentencePiece's way, by longest broken prefix in the byte-level way.
        errors = "replace" if tokens.byte_level else "surrogateescape"
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)
        self._at_start = tokens.strips_space and not continues

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; returns the text that is certain now. Ids that no token has give no text."""
        lookup, skipped = self._bytes, self._skipped
        data = b"".join([lookup[token_id] for token_id in token_ids if token_id not in skipped])
        return self._text(self._decoder.decode(data)) if data else ""

    def finish(self) -> str:
        """End the text; bytes still held back become U+FFFD."""
        return self._text(self._decoder.decode(b"", final=True))

    def _text(self, text: str) -> str:
        if not self._bytes.byte_level:
            text = _LONE_BYTES.sub("\ufffd", text)
        if self._at_start and text:
            self._at_start = False
            text = text.removeprefix(" ")
        return text
