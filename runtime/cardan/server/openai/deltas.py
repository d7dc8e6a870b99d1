"""What is found in an answer, in the chat API's form: the message of a whole response, the deltas of a stream.

It knows no format of calls; ``cardan.parsers`` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cardan.parsers import (
    Answer,
    CallArguments,
    CallDropped,
    CallEnd,
    CallStart,
    Content,
    Event,
    Parser,
    Reasoning,
)

Delta = dict[str, Any]


@dataclass(slots=True)
class AnswerReader:
    """Reads one choice.

    Attributes:
        parser: takes its text apart.
        one_call: only the first call is wanted; others are left out.
        streams_reasoning: reasoning goes out as it comes; otherwise all of it at its end.
        answer: what was found so far.
    """

    parser: Parser
    one_call: bool = False
    streams_reasoning: bool = True
    answer: Answer = field(default_factory=Answer)
    _called: int | None = None
    _ended: bool = False
    _thoughts: list[str] = field(default_factory=list)

    def push(self, text: str, *, ends: bool) -> list[Delta]:
        """Take the next text; returns what a stream says of it.

        Args:
            text: of this choice.
            ends: whether it is the last.
        """
        events = self.read(text, ends=ends)
        deltas = [delta for event in events for delta in self._deltas(event)]
        return deltas + list(self._held_thoughts()) if ends else deltas

    def read(self, text: str, *, ends: bool) -> list[Event]:
        """Take the next text; returns what is found in it.

        Args:
            text: of this choice.
            ends: whether it is the last.
        """
        events = self.parser.push(text)
        if ends:
            events += self.parser.finish()
        events = list(self._kept(events))
        self.answer.add(events)
        return events

    @property
    def has_called(self) -> bool:
        """Whether a function is called."""
        return bool(self.answer.calls)

    @property
    def has_enough(self) -> bool:
        """Whether one call was wanted, and it is complete."""
        return self._ended

    def message(self, *, with_reasoning: bool) -> dict[str, Any]:
        """The whole answer.

        Args:
            with_reasoning: whether the message has a field for reasoning.
        """
        answer = self.answer
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
        if with_reasoning:
            message["reasoning_content"] = answer.reasoning or None
        if answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.calls.values()
            ]
        return message

    def _kept(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            if self.one_call and isinstance(event, CallStart | CallArguments | CallEnd | CallDropped):
                if self._called is None:
                    self._called = event.index
                if event.index != self._called:
                    continue
                if isinstance(event, CallDropped):
                    self._called = None
                self._ended |= isinstance(event, CallEnd)
            yield event

    def _deltas(self, event: Event) -> Iterator[Delta]:
        if isinstance(event, Reasoning):
            if self.streams_reasoning:
                yield {"reasoning_content": event.text}
            else:
                self._thoughts.append(event.text)
            return
        yield from self._held_thoughts()
        match event:
            case Content(text):
                yield {"content": text}
            case CallStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                yield {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
            case CallArguments(index, text):
                yield {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _held_thoughts(self) -> Iterator[Delta]:
        thoughts, self._thoughts = "".join(self._thoughts), []
        if thoughts:
            yield {"reasoning_content": thoughts}
