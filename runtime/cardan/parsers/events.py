"""What a parser finds in an answer: words for the reader, reasoning, and calls of tools, piece by piece.

It knows no format and no API.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Words of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Words that the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; its arguments follow.

    Attributes:
        index: which call of this answer, from 0.
        id: how a tool's result refers to it.
        name: of the function.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments; the pieces of a call joined are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is complete."""

    index: int


@dataclass(frozen=True, slots=True)
class CallDropped:
    """A call that has begun breaks off, and was none: what the model wrote of it follows as ``Content``."""

    index: int


Event: TypeAlias = Content | Reasoning | CallStart | CallArguments | CallEnd | CallDropped


@dataclass(slots=True)
class ToolCall:
    """One complete call: ``id``, ``name``, and ``arguments`` as a JSON object's text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """An answer taken apart: the sum of the events so far.

    Attributes:
        content: words for the reader.
        reasoning: words of thought.
        calls: complete calls by their index.
    """

    content: str = ""
    reasoning: str = ""
    calls: dict[int, ToolCall] = field(default_factory=dict)
    _open: dict[int, ToolCall] = field(default_factory=dict)

    @property
    def unfinished(self) -> bool:
        """Whether a call has begun that neither ended nor was dropped."""
        return bool(self._open)

    def add(self, events: Iterable[Event]) -> None:
        """Take the next events."""
        content, reasoning = [self.content], [self.reasoning]  # joined once: adding to a text copies all of it
        for event in events:
            match event:
                case Content(text):
                    content.append(text)
                case Reasoning(text):
                    reasoning.append(text)
                case CallStart(index, call_id, name):
                    self._open[index] = ToolCall(call_id, name)
                case CallArguments(index, text):
                    self._open[index].arguments += text
                case CallEnd(index):
                    self.calls[index] = self._open.pop(index)
                case CallDropped(index):
                    del self._open[index]
        self.content, self.reasoning = "".join(content), "".join(reasoning)
