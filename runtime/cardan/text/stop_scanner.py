"""Finds stop strings and stop patterns in text that comes in pieces.

It does not know tokens, nor what happens after a stop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import re2

from cardan.errors import RequestError
from cardan.text.regex_width import first_match_width
from cardan.text.tokenizer import Tokenizer
from cardan.types import SamplingParams

MAX_STOPS = 64
"""Most stop strings, and most stop patterns, of one request."""

MAX_STOP_CHARS = 1024
"""Longest stop string or pattern, in characters."""

REGEX_WINDOW = 1024
"""Characters in which a stop pattern must have matched.

A pattern is looked for only where its shortest match could still begin: as far back as that match can be
long, and no further than this. So a token costs the same however long the answer is, and a stream holds back
that much text. A pattern that needs more characters before it matches (``a.*b`` with a long middle) is not seen.
"""

_REGEX_MEMORY_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop that was found; offsets count characters from the start of the text.

    Attributes:
        stop: the string, or the pattern's source.
        start: where it begins.
        end: one past its last character.
    """

    stop: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _StopString:
    """A stop string and, for each length of a match that fails, the longest shorter one that still stands.

    Source: Knuth, Morris, Pratt 1977, "Fast pattern matching in strings", section 2.
    """

    text: str
    fallback: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _StopPattern:
    """A compiled pattern and how many characters before new text its match can begin."""

    source: str
    regex: Any
    reach: int


@dataclass(frozen=True, slots=True)
class StopTexts:
    """Stop strings and patterns of one request, checked and compiled.

    Attributes:
        strings: the stop strings.
        patterns: the stop patterns.
        special_ids: special tokens whose text is one of the stop strings.
    """

    strings: tuple[_StopString, ...]
    patterns: tuple[_StopPattern, ...]
    special_ids: Mapping[int, str]


def compile_stop_texts(params: SamplingParams, tokenizer: Tokenizer) -> StopTexts | None:
    """Check and compile the stop strings and patterns, or None when there are none.

    Raises:
        RequestError: one is empty, too long, or not valid, or there are too many.
    """
    if not params.stop and not params.stop_regex:
        return None
    _check_count("stop", params.stop)
    _check_count("stop_regex", params.stop_regex)
    special: dict[int, str] = {}
    for text in params.stop:
        _check_length("stop", text)
        token_id = tokenizer.token_id(text)
        if token_id is not None and token_id in tokenizer.special_ids:
            special[token_id] = text
    return StopTexts(
        strings=tuple(_StopString(text, _fallbacks(text)) for text in params.stop),
        patterns=tuple(_compile_pattern(pattern) for pattern in params.stop_regex),
        special_ids=special,
    )


def validate_stop_regex(pattern: str) -> None:
    """Check one stop pattern (RE2 syntax: no look-around, no back-references; time linear in the text).

    Raises:
        RequestError: it is empty, too long, not valid, or matches the empty text.
    """
    _compile_pattern(pattern)


def _check_count(name: str, stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise RequestError(f"{name} may have at most {MAX_STOPS} entries, got {len(stops)}.", param=name)


def _check_length(name: str, text: str) -> None:
    if not text:
        raise RequestError(f"{name} must not hold an empty string. Leave the entry out.", param=name)
    if len(text) > MAX_STOP_CHARS:
        raise RequestError(
            f"An entry of {name} may have at most {MAX_STOP_CHARS} characters, got {len(text)}.", param=name
        )


def _fallbacks(text: str) -> tuple[int, ...]:
    """``[k]`` is the length of the longest proper prefix of ``text`` that ends its first ``k`` characters."""
    table = [0, 0]
    length = 0
    for char in text[1:]:
        while length and text[length] != char:
            length = table[length]
        length += text[length] == char
        table.append(length)
    return tuple(table)


def _compile_pattern(pattern: str) -> _StopPattern:
    _check_length("stop_regex", pattern)
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _REGEX_MEMORY_BYTES
    try:
        regex = re2.compile(pattern, options)
    except re2.error as error:
        detail = error.args[0] if error.args else error
        reason = detail.decode("utf-8", "replace") if isinstance(detail, bytes) else str(detail)
        raise RequestError(
            f"stop_regex {pattern!r} is not a valid RE2 pattern: {reason}. "
            "RE2 has no look-around and no back-references.",
            param="stop_regex",
        ) from error
    except UnicodeEncodeError as error:
        raise RequestError(
            "stop_regex holds half of a surrogate pair. Send valid Unicode.", param="stop_regex"
        ) from error
    if regex.search("") is not None:
        raise RequestError(
            f"stop_regex {pattern!r} matches the empty text, so it would stop every answer at once. "
            "Make it match at least one character.",
            param="stop_regex",
        )
    width = first_match_width(pattern)
    reach = REGEX_WINDOW if width is None else min(width, REGEX_WINDOW)
    return _StopPattern(pattern, regex, max(reach - 1, 0))


class StopScanner:
    """Looks for the stops in one text. Each piece costs its own length (patterns: and their reach)."""

    __slots__ = ("_length", "_matched", "_reach", "_tail", "_texts")

    def __init__(self, texts: StopTexts) -> None:
        self._texts = texts
        self._matched = [0] * len(texts.strings)
        self._reach = max((pattern.reach for pattern in texts.patterns), default=0)
        self._tail = ""
        self._length = 0

    @property
    def length(self) -> int:
        """Characters fed so far."""
        return self._length

    @property
    def num_held(self) -> int:
        """How many of the last characters may belong to a stop that later text completes."""
        return max(min(self._reach, self._length), *self._matched, 0)

    def feed(self, piece: str) -> StopMatch | None:
        """Add text; returns the stop that it completes.

        Of several, the string that ends first (the longest of those), and else the first pattern in the
        request's order.
        """
        match = self._match_strings(piece) or self._match_patterns(piece)
        self._length += len(piece)
        return match

    def _match_strings(self, piece: str) -> StopMatch | None:
        best: StopMatch | None = None
        for index, stop in enumerate(self._texts.strings):
            end = self._advance(index, stop, piece)
            if end is None:
                continue
            match = StopMatch(stop.text, self._length + end - len(stop.text), self._length + end)
            if best is None or (match.end, match.start) < (best.end, best.start):
                best = match
        return best

    def _advance(self, index: int, stop: _StopString, piece: str) -> int | None:
        """Where in ``piece`` the string's first match ends, or None; keeps the length matched at its end."""
        text, fallback = stop.text, stop.fallback
        matched = self._matched[index]
        start = 0
        if not matched:
            start = piece.find(text[0])
            if start < 0:
                return None
        for at in range(start, len(piece)):
            char = piece[at]
            while matched and text[matched] != char:
                matched = fallback[matched]
            matched += text[matched] == char
            if matched == len(text):
                self._matched[index] = 0
                return at + 1
        self._matched[index] = matched
        return None

    def _match_patterns(self, piece: str) -> StopMatch | None:
        if not self._texts.patterns or not piece:
            return None
        before = self._tail
        text = before + piece
        found: StopMatch | None = None
        for pattern in self._texts.patterns:
            hit = pattern.regex.search(text, max(len(before) - pattern.reach, 0))
            if hit is not None:
                offset = self._length - len(before)
                found = StopMatch(pattern.source, offset + hit.start(), offset + hit.end())
                break
        # One character more than the reach: what stands before a match decides \b and ^.
        self._tail = text[-(self._reach + 1) :]
        return found
