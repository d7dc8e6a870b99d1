"""What all parsers share: events are gathered while a script reads, and a call that breaks off becomes content.

It knows no format.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cardan.parsers.events import CallArguments, CallDropped, CallEnd, CallStart, Content, Event, Reasoning
from cardan.parsers.source import Markers, Script, Source

_ANY_NAME = re.compile(r"[\w.:/-]{1,128}")
"""Names of functions where none are declared."""


class BrokenCallError(Exception):
    """What was read is no call after all; it never leaves a parser."""


class Parser(Protocol):
    """Takes one answer apart. However its text is split into pieces, the events say the same."""

    def push(self, text: str) -> list[Event]:
        """Add text; returns what is certain now."""

    def finish(self) -> list[Event]:
        """End the text; what was held back comes out."""


def new_call_id() -> str:
    """An id that no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserContext:
    """What a parser of tool calls is told about the request.

    Attributes:
        tools: JSON schemas of the parameters by name of the function. Calls of other functions are content; without
            any, every name is taken.
        new_id: gives each call its id, where the model writes none.
        framed: only calls in one of the format's frames are calls, since a grammar holds those and no others.
    """

    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    new_id: Callable[[], str] = new_call_id
    framed: bool = False

    def knows(self, name: str) -> bool:
        """Whether a function may be called."""
        return name in self.tools if self.tools else _ANY_NAME.fullmatch(name) is not None

    def may_begin(self, text: str) -> bool:
        """Whether the name of a function that may be called begins so."""
        if not self.tools:
            return not text or _ANY_NAME.fullmatch(text) is not None
        return any(name.startswith(text) for name in self.tools)

    def schema(self, name: str) -> Mapping[str, Any]:
        """Schema of a function's parameters; empty when there is none."""
        return self.tools.get(name, {})


def read_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Names and schemas of functions that are declared as in the OpenAI API."""
    functions = [tool.get("function", tool) for tool in tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}


class ScriptedParser:
    """A parser whose format is written down as one script, ``_read``, over a ``Source``."""

    def __init__(self) -> None:
        self._source = Source()
        self._events: list[Event] = []
        self._script: Generator[None, None, None] = self._read()

    def _read(self) -> Script[None]:
        """Read to the end of the text, and emit what is found."""
        raise AssertionError("a parser must say how it reads")

    def push(self, text: str) -> list[Event]:
        """Add text; returns what is certain now."""
        self._source.feed(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """End the text; what was held back comes out."""
        self._source.end()
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._script, None)
        events, self._events = self._events, []
        return list(_joined(events))

    def _emit(self, event: Event) -> None:
        match event:
            case Content("") | Reasoning("") | CallArguments(_, ""):
                return
        self._events.append(event)


def _joined(events: Iterable[Event]) -> Iterator[Event]:
    """The same with the texts of neighbours of one kind in one event, each text copied once."""
    for _, group in itertools.groupby(events, key=_kind):
        neighbours = list(group)
        match neighbours[0]:
            case Content() | Reasoning() | CallArguments() if len(neighbours) > 1:
                text = "".join(one.text for one in neighbours)  # type: ignore[union-attr]
                yield dataclasses.replace(neighbours[0], text=text)
            case _:
                yield from neighbours


def _kind(event: Event) -> tuple[type[Event], int]:
    return type(event), event.index if isinstance(event, CallArguments) else 0


class CallParser(ScriptedParser):
    """A parser of tool calls that stand between words. Its format says what begins calls, and how they go on.

    White space before what begins calls belongs to the calls, as does what is left behind the last one.
    """

    starts: Markers
    """What calls begin with."""

    def __init__(self, context: ParserContext) -> None:
        self._context = context
        self._num_started = 0
        self._num_ended = 0
        self._open: int | None = None
        super().__init__()

    def _read_calls(self, start: str) -> Script[None]:
        """Read the calls that follow ``start``, which was taken. Ends where words may follow again.

        Raises:
            BrokenCallError: this is no call. What was taken becomes content, and reading goes on behind it.
        """
        raise AssertionError("a parser must say how calls are read")

    def _read(self) -> Script[None]:
        while not (yield from self._read_words()):
            pass

    def _read_words(self) -> Script[bool]:
        """Read words up to the next calls, and these. Returns whether the text has ended."""
        self._source.mark()
        text, marker = yield from self._source.piece(self.starts, hold_space=True)
        if marker:
            self._source.take(len(marker))
            yield from self._guarded(self._read_calls(marker))
            return False
        is_left = marker == "" and text.isspace() and self._num_ended > 0
        self._emit(Content("" if is_left else text))
        return marker == ""

    def _guarded(self, calls: Script[None]) -> Script[None]:
        """Run a script that reads calls; what it has taken since its last call becomes content if it breaks off."""
        try:
            yield from calls
        except BrokenCallError:
            if self._open is not None:
                self._emit(CallDropped(self._open))
                self._open = None
            self._emit_taken()

    def _emit_taken(self) -> None:
        """Make content of what was taken since the mark."""
        self._emit(Content(self._source.taken()))

    def _start_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a call.

        Raises:
            BrokenCallError: there is no such function.
        """
        if not self._context.knows(name):
            raise BrokenCallError
        self._open = self._num_started
        self._num_started += 1
        self._emit(CallStart(self._open, call_id or self._context.new_id(), name))

    def _add_arguments(self, text: str) -> None:
        assert self._open is not None
        self._emit(CallArguments(self._open, text))

    def _end_call(self) -> None:
        """End the call; what follows stands for itself."""
        assert self._open is not None
        self._emit(CallEnd(self._open))
        self._open = None
        self._num_ended += 1
        self._source.mark()

    def _read_name(self, ends: Iterable[str], before: str = "") -> Script[tuple[str, str]]:
        """Take a function's name and what ends it; white space around the name is left out. Returns both.

        Args:
            ends: what ends the name.
            before: a character that ends the name too and is not taken; the end is an empty text then.

        Raises:
            BrokenCallError: what stands there is the name of no function.
        """
        name = ""
        while not (end := (yield from self._source.accept_any(ends))):
            following = yield from self._source.peek()
            if before and following == before:
                break
            if not following or not self._context.may_begin((name + following).strip()):
                raise BrokenCallError
            name += self._source.take(1)
        if not self._context.knows(name.strip()):
            raise BrokenCallError
        return name.strip(), end

    def _read_word(self, end: str, most: int = 256) -> Script[str]:
        """Take a short text of one line up to what ends it, and that too.

        Raises:
            BrokenCallError: it is too long, or there is no end to it.
        """
        word = ""
        while not (yield from self._source.accept(end)):
            following = yield from self._source.peek()
            if following in ("", "\n") or len(word) == most:
                raise BrokenCallError
            word += self._source.take(1)
        return word

    def _expect(self, *literals: str) -> Script[None]:
        """Take texts that must come next, with white space before each.

        Raises:
            BrokenCallError: they do not.
        """
        for literal in literals:
            yield from self._source.skip_space()
            if not (yield from self._source.accept(literal)):
                raise BrokenCallError
