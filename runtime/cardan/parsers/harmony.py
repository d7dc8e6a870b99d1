"""OpenAI's harmony format, in which gpt-oss writes reasoning, calls and words as messages of channels.

``<|channel|>analysis<|message|>…<|end|>`` is reasoning, ``<|start|>assistant<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>{…}<|call|>`` a call, and ``<|start|>assistant<|channel|>final<|message|>…<|return|>`` the
answer; commentary to no one is for the reader as well.
"""

from __future__ import annotations

import re

from cardan.parsers.base import BrokenCallError, ParserContext
from cardan.parsers.events import Content, Reasoning
from cardan.parsers.json_calls import JsonCallParser
from cardan.parsers.json_values import read_value
from cardan.parsers.source import Markers, Script

HARMONY_MARKS = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
)
"""Marks of the format; all of them are special tokens."""

_BEGINS = HARMONY_MARKS[:2]
_ENDS = HARMONY_MARKS[4:]
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_MAX_HEADER = 512


class HarmonyParser(JsonCallParser):
    """Reads whole answers of gpt-oss. Messages of one kind are parted by a blank line."""

    starts = Markers([*_BEGINS, *_ENDS])
    _bodies_end = Markers([*_BEGINS, *_ENDS])
    _header_end = Markers(["<|message|>"])

    def __init__(self, context: ParserContext | None, *, separate_reasoning: bool) -> None:
        """Start before an answer.

        Args:
            context: functions whose calls are looked for; None takes calls for content.
            separate_reasoning: tell reasoning apart from content.
        """
        self._calls_wanted = context is not None
        self._kinds: dict[str, type[Content | Reasoning]] = {
            "analysis": Reasoning if separate_reasoning else Content,
            "commentary": Content,
            "final": Content,
        }
        self._has_said: set[type[Content | Reasoning]] = set()
        super().__init__(context or ParserContext())

    def _read_words(self) -> Script[bool]:
        self._source.mark()
        text, marker = yield from self._source.piece(self.starts)
        self._source.taken()
        self._emit(Content(text))
        if marker in _BEGINS:
            self._source.mark()
            yield from self._guarded(self._read_message())
        elif marker:
            self._source.take(len(marker))
        return marker == ""

    def _read_message(self) -> Script[None]:
        header = yield from self._read_header()
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        if recipient is not None and self._calls_wanted:
            yield from self._read_call(recipient[1])
            return
        if recipient is not None or channel is None or channel[1] not in self._kinds:
            raise BrokenCallError
        self._source.taken()
        yield from self._read_body(self._kinds[channel[1]])

    def _read_header(self) -> Script[str]:
        """Take everything up to the message itself.

        Raises:
            BrokenCallError: there is no message, or too much before it.
        """
        header = ""
        while not (yield from self._source.accept("<|message|>")):
            if not (yield from self._source.peek()) or len(header) == _MAX_HEADER:
                raise BrokenCallError
            header += (yield from self._source.accept_any(_BEGINS)) or self._source.take(1)
            for end in _ENDS:
                if (yield from self._source.at(end)):
                    raise BrokenCallError
        return header

    def _read_call(self, recipient: str) -> Script[None]:
        name = recipient.removeprefix("functions.")
        if not self._context.knows(name):
            raise BrokenCallError
        yield from self._source.skip_space()
        if not (yield from self._source.at("{")):
            raise BrokenCallError
        self._start_call(name)
        yield from read_value(self._source, self._add_arguments)
        self._end_call()
        yield from self._source.accept_spaced(*_ENDS)

    def _read_body(self, kind: type[Content | Reasoning]) -> Script[None]:
        parted = kind not in self._has_said
        while True:
            text, marker = yield from self._source.piece(self._bodies_end)
            if text and not parted:
                self._emit(kind("\n\n"))
            parted = parted or bool(text)
            self._emit(kind(text))
            if text:
                self._has_said.add(kind)
            if marker is not None:
                return
