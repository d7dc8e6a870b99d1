"""Tells reasoning apart from the answer that follows it, where the model puts it between two tags.

It does not know calls of tools: what follows the reasoning is another parser's.
"""

from __future__ import annotations

from collections.abc import Iterable

from cardan.parsers.base import Parser, ScriptedParser
from cardan.parsers.events import Content, Event, Reasoning
from cardan.parsers.source import Markers, Script


class PlainParser:
    """Takes every text as content."""

    def push(self, text: str) -> list[Event]:
        """Add text."""
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        """End the text."""
        return []


class ReasoningInContentParser(ScriptedParser):
    """Leaves everything up to a closing tag, and that too, in the content, for another parser to go on behind it."""

    def __init__(self, closing: str, inner: Parser) -> None:
        """Start before an answer.

        Args:
            closing: the tag.
            inner: takes what follows it.
        """
        self._closing = Markers([closing])
        self._inner = inner
        super().__init__()

    def _read(self) -> Script[None]:
        marker = None
        while marker is None:
            text, marker = yield from self._source.piece(self._closing)
            self._emit(Content(text + (marker or "")))
        self._source.take(len(marker))
        while text := (yield from self._source.rest()):
            self._take(self._inner.push(text))
        self._take(self._inner.finish())

    def _take(self, events: list[Event]) -> None:
        for event in events:
            self._emit(event)


class ReasoningParser(ScriptedParser):
    """Reasoning stands at the very beginning of an answer, or nowhere.

    White space beside the tags belongs to them. Reasoning that is never closed is reasoning to the end.
    """

    def __init__(self, tags: tuple[str, str], inner: Parser, *, is_open: bool, also_ends: Iterable[str] = ()) -> None:
        """Start before an answer.

        Args:
            tags: what opens and what closes the reasoning.
            inner: takes what is no reasoning.
            is_open: whether the answer begins within the reasoning, because the prompt or the model's habit opened
                it; an opening tag is then left out all the same.
            also_ends: texts that end the reasoning too and belong to what follows, such as the beginning of calls,
                which some models write without closing their reasoning.
        """
        self._opening, self._closing = tags
        self._inner = inner
        self._is_open = is_open
        self._ends = Markers([self._closing, *also_ends])
        super().__init__()

    def _read(self) -> Script[None]:
        space = yield from self._source.skip_space()
        if (yield from self._source.accept(self._opening)) or self._is_open:
            yield from self._read_reasoning()
        else:
            self._pass(space)
        while text := (yield from self._source.rest()):
            self._pass(text)
        for event in self._inner.finish():
            self._emit(event)

    def _read_reasoning(self) -> Script[None]:
        yield from self._source.skip_space()
        while True:
            text, marker = yield from self._source.piece(self._ends, hold_space=True)
            if marker is not None:
                break
            self._emit(Reasoning(text))
        if marker == self._closing:
            self._source.take(len(marker))
            yield from self._source.skip_space()

    def _pass(self, text: str) -> None:
        for event in self._inner.push(text):
            self._emit(event)
