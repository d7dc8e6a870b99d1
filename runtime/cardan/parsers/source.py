"""Text that arrives in pieces, read by scripts as if it were all there: a script waits where it cannot decide yet.

What a script finds depends on the text alone, never on how it was split. It knows no format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Script: TypeAlias = Generator[None, None, T]
"""A step of reading: it yields to wait for more text."""


MAX_SPACES = 64
"""Most white space that is held back for what may follow; a model that writes nothing else must not cost ever more."""


class Markers:
    """Texts to look for, and what must be held back because it may still become one of them."""

    __slots__ = ("_first", "_pattern", "_prefixes", "texts")

    def __init__(self, texts: Iterable[str]) -> None:
        """Take the texts.

        Raises:
            ValueError: one is empty, or part of another, so that what is found would depend on how text arrives.
        """
        self.texts = tuple(sorted(set(texts), key=len, reverse=True))
        # Searched for together, so that reading on costs what is read, not what is left.
        self._pattern = re.compile("|".join(map(re.escape, self.texts))) if self.texts else None
        self._prefixes = frozenset(text[:length] for text in self.texts for length in range(1, len(text)))
        self._first = frozenset(text[:1] for text in self.texts)
        for text in self.texts:
            # What begins within the first character is a prefix, or the text itself.
            within = self.find(text, 1)
            if not text or text in self._prefixes or within is not None:
                raise ValueError(f"The marker {within[1] if within else text!r} is empty or part of another one.")

    def find(self, text: str, start: int) -> tuple[int, str] | None:
        """The first marker in ``text`` from ``start`` on."""
        found = self._pattern.search(text, start) if self._pattern is not None else None
        return None if found is None else (found.start(), found[0])

    def num_held(self, text: str, start: int) -> int:
        """How many characters at the end of ``text`` may be the beginning of a marker."""
        if not self.texts:
            return 0
        longest = min(len(text) - start, len(self.texts[0]) - 1)
        for length in range(longest, 0, -1):
            if text[len(text) - length] in self._first and text[len(text) - length :] in self._prefixes:
                return length
        return 0


class Source:
    """The text so far, with a position. What was taken while a mark is set can be had again."""

    __slots__ = ("_kept", "_position", "_text", "ended")

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._kept: list[str] | None = None
        self.ended = False

    def feed(self, text: str) -> None:
        """Add text."""
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self) -> None:
        """Say that no more text comes."""
        self.ended = True

    def mark(self) -> None:
        """Keep what is taken from here on."""
        self._kept = []

    def taken(self) -> str:
        """What was taken since the mark, which is lifted."""
        kept, self._kept = self._kept, None
        return "".join(kept or [])

    def take(self, count: int) -> str:
        """The next characters, which must be there."""
        text = self._text[self._position : self._position + count]
        self._position += len(text)
        if self._kept is not None:
            self._kept.append(text)
        return text

    def peek(self) -> Script[str]:
        """The next character, or an empty text at the end."""
        while self._position >= len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._position]

    def at(self, literal: str) -> Script[bool]:
        """Whether ``literal`` comes next."""
        while True:
            if self._text.startswith(literal, self._position):
                return True
            rest = self._text[self._position : self._position + len(literal)]
            if self.ended or not literal.startswith(rest):
                return False
            yield

    def accept(self, literal: str) -> Script[bool]:
        """Take ``literal`` if it comes next."""
        found = yield from self.at(literal)
        if found:
            self.take(len(literal))
        return found

    def accept_any(self, literals: Iterable[str]) -> Script[str]:
        """Take the first of several texts that comes next; an empty text when none does."""
        for literal in literals:
            if (yield from self.accept(literal)):
                return literal
        return ""

    def accept_spaced(self, *literals: str) -> Script[str]:
        """Take the first of several texts that comes next behind white space, with that space.

        Nothing is taken when none does, and an empty text is returned.
        """
        space, longest = 0, max(map(len, literals))
        while True:
            while self._position + space < len(self._text) and self._text[self._position + space].isspace():
                space += 1
            begin = self._position + space
            rest = self._text[begin : begin + longest]
            for literal in literals:
                if rest.startswith(literal):
                    self.take(space + len(literal))
                    return literal
            if self.ended or (rest and not any(literal.startswith(rest) for literal in literals)):
                return ""
            yield

    def skip_space(self) -> Script[str]:
        """Take white space."""
        return (yield from self.take_while(str.isspace))

    def take_while(self, belongs: Callable[[str], bool], most: int | None = None) -> Script[str]:
        """Take characters for as long as they belong, at most so many."""
        taken: list[str] = []
        while most is None or len(taken) < most:
            character = yield from self.peek()
            if not character or not belongs(character):
                break
            taken.append(self.take(1))
        return "".join(taken)

    def run(self, stops: frozenset[str]) -> Script[str]:
        """Take what is there up to one of a few characters; empty when one of them, or the end, comes next."""
        first = yield from self.peek()
        if not first or first in stops:
            return ""
        end = self._position + 1
        while end < len(self._text) and self._text[end] not in stops:
            end += 1
        return self.take(end - self._position)

    def piece(self, markers: Markers, *, hold_space: bool = False) -> Script[tuple[str, str | None]]:
        """The next piece of text that is certain to hold no part of a marker, and the marker that ends it.

        The marker itself is not taken. At the end of the text the marker is an empty text; None means that the
        text goes on.

        Args:
            markers: what ends a piece.
            hold_space: keep white space for the next piece, so that a piece with a marker has what stood before it
                since the last word, up to ``MAX_SPACES`` characters.
        """
        while True:
            found = markers.find(self._text, self._position)
            if found is not None:
                return self._piece_before(*found, hold_space=hold_space)
            if self.ended:
                return self._piece_before(len(self._text), "", hold_space=hold_space)
            end = len(self._text) - markers.num_held(self._text, self._position)
            if hold_space:
                end -= self._num_spaces(end)
            if end > self._position:
                return self.take(end - self._position), None
            yield

    def _piece_before(self, end: int, marker: str, *, hold_space: bool) -> tuple[str, str | None]:
        words_end = end - self._num_spaces(end)
        if hold_space and words_end > self._position:
            return self.take(words_end - self._position), None
        return self.take(end - self._position), marker

    def _num_spaces(self, end: int) -> int:
        """How many characters of white space stand before ``end``, but no more than are held back."""
        tail = self._text[max(self._position, end - MAX_SPACES) : end]
        return len(tail) - len(tail.rstrip())

    def until(self, markers: Markers) -> Script[tuple[str, str]]:
        """Everything up to a marker, and that marker, which is not taken; an empty one at the end of the text."""
        pieces: list[str] = []
        while True:
            text, marker = yield from self.piece(markers)
            pieces.append(text)
            if marker is not None:
                return "".join(pieces), marker

    def rest(self) -> Script[str]:
        """Whatever has arrived; an empty text at the end."""
        yield from self.peek()
        return self.take(len(self._text) - self._position)
