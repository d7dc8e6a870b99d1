"""Text of one answer as it streams: what is certain goes out, what may belong to a stop is held back.

It does not decide when an answer ends; the scheduler says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from cardan.text.stop_scanner import StopScanner, compile_stop_texts
from cardan.text.tokenizer import Tokenizer
from cardan.types import FinishKind, FinishReason, SamplingParams


class TextStream:
    """Tokens of one answer in, its text out. However the tokens are split, the pieces join to the same text.

    The text ends before the stop string or pattern that ended it, and without the stop token's own text;
    with ``no_stop_trim`` it is the text of all tokens.
    """

    __slots__ = ("_detokenizer", "_pending", "_scanner", "_stopped", "_trims")

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer) -> None:
        """Start before the first token.

        Raises:
            RequestError: as ``build_stop_checker``.
        """
        self._detokenizer = tokenizer.detokenizer(
            skip_special_tokens=params.skip_special_tokens, continues=True, shown=params.shown_special_ids
        )
        self._trims = not params.no_stop_trim
        texts = compile_stop_texts(params, tokenizer) if self._trims else None
        self._scanner = None if texts is None else StopScanner(texts)
        self._pending = ""
        self._stopped = False

    def push(self, token_ids: Sequence[int], finish: FinishReason | None = None) -> str:
        """Add tokens; returns the text that is certain now.

        Args:
            token_ids: the next tokens, the one that ended the answer included.
            finish: with the last tokens, why the answer ended. Everything held back then goes out.
        """
        if self._trims and finish is not None and self._ends_with_stop_token(token_ids, finish):
            token_ids = token_ids[:-1]
        if self._stopped:
            return ""
        if self._scanner is None:
            text = self._detokenizer.push(token_ids)
            return text if finish is None else text + self._detokenizer.finish()
        text = self._scan(self._scanner, token_ids)
        if finish is not None and not self._stopped:
            text += self._pending + self._detokenizer.finish()
            self._pending = ""
        return text

    @staticmethod
    def _ends_with_stop_token(token_ids: Sequence[int], finish: FinishReason) -> bool:
        return finish.kind is FinishKind.STOP and len(token_ids) > 0 and token_ids[-1] == finish.matched

    def _scan(self, scanner: StopScanner, token_ids: Sequence[int]) -> str:
        """Text that no stop can touch any more. Tokens are looked at singly, as the stop checker does."""
        certain: list[str] = []
        for token_id in token_ids:
            piece = self._detokenizer.push((token_id,))
            pending_start = scanner.length - len(self._pending)
            self._pending += piece
            match = scanner.feed(piece)
            if match is not None:
                certain.append(self._pending[: max(match.start - pending_start, 0)])
                self._pending = ""
                self._stopped = True
                break
            cut = len(self._pending) - scanner.num_held
            if cut > 0:
                certain.append(self._pending[:cut])
                self._pending = self._pending[cut:]
        return "".join(certain)
