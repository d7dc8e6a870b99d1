"""Stop conditions of one request: stop strings, stop patterns, stop tokens, length, in that order.

It does not know how requests are scheduled; the scheduler asks after each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cardan.text.detokenizer import Detokenizer
from cardan.text.stop_scanner import StopScanner, StopTexts, compile_stop_texts, validate_stop_regex
from cardan.text.tokenizer import Tokenizer
from cardan.types import FinishKind, FinishReason, SamplingParams

__all__ = ["StopChecker", "build_stop_checker", "validate_stop_regex"]


class StopChecker:
    """Says when one request is done. It sees each output token once, in order.

    A checker that is ``plain`` needs no text: such a request is done exactly when

    - its last token is in ``stop_ids`` and at least ``min_new_tokens`` tokens stand before it, or
    - it has ``max_new_tokens`` tokens,

    so a scheduler may test many of them at once without calling ``check``.

    Attributes:
        plain: whether there are no stop strings and no stop patterns.
        stop_ids: tokens that end the answer: those the request names and, unless ``ignore_eos``, the model's own.
        ignore_eos: whether the model's own were left out.
        min_new_tokens: a token in ``stop_ids`` ends the answer only behind this many others.
        max_new_tokens: the answer's longest length; a scheduler whose pool is smaller may lower it.
        num_kept: how many output tokens belong to the finished answer (the stop token included); tokens behind
            them, which a step of several tokens can bring, are to be dropped. None until ``check`` said it is done.
    """

    __slots__ = (
        "_detokenizer",
        "_scanner",
        "_texts",
        "ignore_eos",
        "max_new_tokens",
        "min_new_tokens",
        "num_kept",
        "plain",
        "stop_ids",
    )

    def __init__(
        self,
        params: SamplingParams,
        eos_ids: frozenset[int],
        texts: StopTexts | None = None,
        detokenizer: Detokenizer | None = None,
    ) -> None:
        """Start before the first output token; ``build_stop_checker`` makes the last two arguments."""
        self.plain = texts is None
        self.ignore_eos = params.ignore_eos
        self.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)
        self.min_new_tokens = params.min_new_tokens
        self.max_new_tokens = params.max_new_tokens
        self.num_kept: int | None = None
        self._texts = texts
        self._scanner = None if texts is None else StopScanner(texts)
        self._detokenizer = detokenizer

    def check(self, output_ids: Sequence[int], new_count: int) -> FinishReason | None:
        """Whether the last ``new_count`` of the output tokens end the answer, and why.

        The first of them that does decides; ``num_kept`` then says where. At one token, stop strings go before
        stop patterns, those before stop tokens, those before length.
        """
        for length in range(len(output_ids) - new_count + 1, len(output_ids) + 1):
            reason = self._check_token(output_ids[length - 1], length)
            if reason is not None:
                self.num_kept = length
                return reason
        return None

    def _check_token(self, token_id: int, length: int) -> FinishReason | None:
        matched = None if self.plain else self._match_text(token_id)
        if matched is not None:
            return FinishReason(FinishKind.STOP, matched=matched)
        if token_id in self.stop_ids and length > self.min_new_tokens:
            return FinishReason(FinishKind.STOP, matched=token_id)
        if length >= self.max_new_tokens:
            return FinishReason(FinishKind.LENGTH, length=length)
        return None

    def _match_text(self, token_id: int) -> str | None:
        texts, scanner, detokenizer = self._texts, self._scanner, self._detokenizer
        assert texts is not None
        assert scanner is not None
        assert detokenizer is not None
        exact = texts.special_ids.get(token_id)
        if exact is not None:
            return exact
        match = scanner.feed(detokenizer.push((token_id,)))
        return None if match is None else match.stop


def build_stop_checker(params: SamplingParams, eos_ids: Iterable[int], tokenizer: Tokenizer) -> StopChecker:
    """The checker of one request.

    Stop strings and patterns are sought in the text that the caller gets, so with ``skip_special_tokens``
    special tokens are not part of it; but a stop string that is just the text of one special token stops at that
    token either way. ``min_new_tokens`` holds back stop tokens only, not stop strings.

    Raises:
        RequestError: a stop string is empty or too long, there are too many, or a pattern is not valid.
    """
    texts = compile_stop_texts(params, tokenizer)
    detokenizer = None
    if texts is not None:
        detokenizer = tokenizer.detokenizer(
            skip_special_tokens=params.skip_special_tokens, continues=True, shown=params.shown_special_ids
        )
    return StopChecker(params, frozenset(eos_ids), texts, detokenizer)
