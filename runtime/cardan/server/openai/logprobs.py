"""Logprobs in OpenAI's two forms: the chat's list of objects, and the completions' parallel lists.

It knows no engine and no HTTP.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from cardan.text.tokenizer import Tokenizer
from cardan.types import TokenLogprobs

Logprobs = Sequence[TokenLogprobs | None]

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot hold, as in OpenAI's API."""


def finite(logprob: float) -> float:
    """The logprob as a JSON number."""
    return max(logprob, LOWEST_LOGPROB)


def chat_logprobs(tokens: Sequence[int], logprobs: Logprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    """The chat form: one object a token."""
    content = []
    for token, known in zip(tokens, logprobs, strict=False):
        if known is None:
            continue
        entry = _chat_entry(token, known.logprob, tokenizer)
        entry["top_logprobs"] = [_chat_entry(other, logprob, tokenizer) for other, logprob in known.top]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token)),
    }


class OffsetTracker:
    """Where each token begins in the returned text, in characters.

    Bytes that do not complete a character yet advance nothing. Where the whole text is known, tokens that it
    does not show (special tokens) advance nothing either.
    """

    def __init__(self, start: int = 0, text: str | None = None) -> None:
        self._offset = start
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def place(self, token_bytes: bytes) -> int:
        """Offset of the next token."""
        offset = self._offset
        piece = self._decoder.decode(token_bytes)
        if self._text is None or self._text.startswith(piece, offset):
            self._offset += len(piece)
        elif self._text.startswith(piece.lstrip(" "), offset):
            self._offset += len(piece.lstrip(" "))
        return offset


def completion_logprobs(
    tokens: Sequence[int], logprobs: Logprobs, tokenizer: Tokenizer, tracker: OffsetTracker, top: int
) -> dict[str, Any]:
    """The completions form: parallel lists; a position without a logprob (the first of the prompt) has null.

    Args:
        tokens: token ids.
        logprobs: one per token.
        tokenizer: for texts and bytes.
        tracker: keeps the offset between the chunks of a stream.
        top: how many alternatives were asked for; with 0 ``top_logprobs`` is null.
    """
    form: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [] if top else None, "text_offset": []}
    for token, known in zip(tokens, logprobs, strict=False):
        form["tokens"].append(tokenizer.token_text(token))
        form["token_logprobs"].append(finite(known.logprob) if known else None)
        form["text_offset"].append(tracker.place(tokenizer.token_bytes(token)))
        if top:
            form["top_logprobs"].append(_alternatives(token, known, tokenizer) if known else None)
    return form


def _alternatives(token: int, known: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for other, logprob in (*known.top, (token, known.logprob)):
        # Two ids may read the same; the likelier one, which comes first, stays.
        found.setdefault(tokenizer.token_text(other), finite(logprob))
    return found
