r"""How long the shortest match of a pattern can be at most, so that a stream need hold back no more.

It knows RE2's syntax and matches nothing itself.

``\d+`` can match a million digits, but it matches at the first one already: its width here is 1.
``a.*b`` can need any number of characters before it matches at all: it has no width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Width:
    """Most characters of any match (``full``), and of the shortest prefix of it that matches (``first``).

    ``optional`` says that any match may be dropped altogether.
    """

    full: float
    first: float
    optional: bool = False


_ONE = _Width(1, 1)
_ZERO = _Width(0, 0)


class _UnknownSyntaxError(Exception):
    """Something this reader does not know; the pattern then counts as unbounded."""


def first_match_width(pattern: str) -> int | None:
    """Most characters that a match of ``pattern`` needs before it is one, or None when there is no limit.

    ``pattern`` must be one that RE2 accepts.
    """
    reader = _Reader(pattern)
    try:
        width = reader.alternation()
    except (_UnknownSyntaxError, RecursionError):
        return None
    if reader.at < len(pattern) or math.isinf(width.first):
        return None
    return int(width.first)


class _Reader:
    """Recursive descent over one pattern."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0

    def alternation(self) -> _Width:
        widths = [self._sequence()]
        while self._peek() == "|":
            self.at += 1
            widths.append(self._sequence())
        return _Width(
            max(width.full for width in widths),
            max(width.first for width in widths),
        )

    def _sequence(self) -> _Width:
        widths: list[_Width] = []
        while self._peek() not in ("", "|", ")"):
            widths.append(self._quantified(self._atom()))
        full = sum(width.full for width in widths)
        while widths and widths[-1].optional:
            widths.pop()
        if not widths:
            return _Width(full, 0)
        return _Width(full, sum(width.full for width in widths[:-1]) + widths[-1].first)

    def _quantified(self, width: _Width) -> _Width:
        while True:
            bounds = self._bounds()
            if bounds is None:
                return width
            least, most = bounds
            if self._peek() == "?":  # lazy: the same matches, in another order
                self.at += 1
            full = 0 if width.full == 0 else width.full * most
            if least == 0:
                width = _Width(full, width.first, optional=True)
            else:
                before = 0 if width.full == 0 else (least - 1) * width.full
                width = _Width(full, (before if least > 1 else 0) + width.first)

    def _bounds(self) -> tuple[int, float] | None:
        char = self._peek()
        simple = {"*": (0, math.inf), "+": (1, math.inf), "?": (0, 1.0)}
        if char in simple:
            self.at += 1
            return simple[char]
        if char != "{":
            return None
        end = self.pattern.find("}", self.at)
        low, comma, high = self.pattern[self.at + 1 : max(end, self.at + 1)].partition(",")
        if end < 0 or not low.isdigit() or not (high.isdigit() or high == ""):
            return None  # a brace that is a literal
        self.at = end + 1
        return int(low), float(high) if high else (math.inf if comma else float(low))

    def _atom(self) -> _Width:
        char = self._next()
        if char in "^$":
            return _ZERO
        if char == "(":
            return self._group()
        if char == "[":
            self._bracket()
            return _ONE
        if char == "\\":
            return self._escape()
        return _ONE

    def _group(self) -> _Width:
        if self._peek() == "?":
            self.at += 1
            if self._peek() in ("P", "<"):
                self._skip_past(">")
            else:
                while self._peek() not in (":", ")"):
                    if self._next() not in "imsU-":
                        raise _UnknownSyntaxError
                if self._next() == ")":
                    return _ZERO
        width = self.alternation()
        if self._next() != ")":
            raise _UnknownSyntaxError
        return width

    def _bracket(self) -> None:
        if self._peek() == "^":
            self.at += 1
        first = True
        while first or self._peek() != "]":
            first = False
            char = self._next()
            if char == "[" and self._peek() == ":":
                self._skip_past(":]")
            elif char == "\\":
                self._escape()
        self.at += 1

    def _escape(self) -> _Width:
        char = self._next()
        if char in "Az":
            return _ZERO
        if char in "bB":
            return _ONE  # takes no character, but the next one can decide it
        if char in "pP":
            if self._next() == "{":
                self._skip_past("}")
        elif char == "x":
            if self._peek() == "{":
                self._skip_past("}")
            else:
                self.at += 2
        elif char == "Q":
            return self._quoted()
        elif char in "C01234567":  # a byte, and octal digits
            raise _UnknownSyntaxError
        return _ONE

    def _quoted(self) -> _Width:
        end = self.pattern.find("\\E", self.at)
        stop = len(self.pattern) if end < 0 else end
        count = stop - self.at
        self.at = stop + (0 if end < 0 else 2)
        if count != 1 and self._peek() in ("*", "+", "?", "{"):
            raise _UnknownSyntaxError
        return _Width(count, count)

    def _skip_past(self, text: str) -> None:
        end = self.pattern.find(text, self.at)
        if end < 0:
            raise _UnknownSyntaxError
        self.at = end + len(text)

    def _peek(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def _next(self) -> str:
        char = self._peek()
        if not char:
            raise _UnknownSyntaxError
        self.at += 1
        return char
