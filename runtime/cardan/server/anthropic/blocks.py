"""Answers in Anthropic's form: blocks of text, thinking and tool use, whole and as the events of a stream.

It knows no engine and no HTTP.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

from cardan.parsers import CallArguments, CallDropped, CallEnd, CallStart, Content, Event, Reasoning


class BlockWriter:
    """Turns what a parser finds into blocks; the events of a stream and the whole blocks say the same.

    A call that breaks off has begun in a stream already: its block ends there, and what the model wrote of it follows
    as text. Whole answers leave the block out.
    """

    def __init__(self, *, show_thinking: bool, omit_thinking: bool = False) -> None:
        """Begin an answer.

        Args:
            show_thinking: whether reasoning becomes blocks; it is dropped otherwise.
            omit_thinking: blocks of thinking are empty.
        """
        self._show_thinking = show_thinking
        self._omit_thinking = omit_thinking
        self._num_blocks = 0
        self._open: dict[str, Any] | None = None
        self._input = ""
        self._thought = ""
        self.blocks: list[dict[str, Any]] = []

    def write(self, found: Iterable[Event]) -> list[dict[str, Any]]:
        """The stream's next events."""
        events: list[dict[str, Any]] = []
        for item in found:
            match item:
                case Content(text):
                    events += self._add("text", text)
                case Reasoning(text):
                    events += self._add_thinking(text)
                case CallStart(_, call_id, name):
                    events += self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
                case CallArguments(_, text):
                    self._input += text
                    events.append(self._delta({"type": "input_json_delta", "partial_json": text}))
                case CallEnd():
                    events += self.end()
                case CallDropped():
                    events += self.end(keep=False)
        return events

    def end(self, *, keep: bool = True) -> list[dict[str, Any]]:
        """End the block that is open, if one is; the whole answer has it where it is kept."""
        block, self._open = self._open, None
        if block is None:
            return []
        events = []
        if block["type"] == "thinking":
            block["signature"] = _sign(self._thought)
            events.append(self._delta({"type": "signature_delta", "signature": block["signature"]}))
        elif block["type"] == "tool_use":
            if keep:
                block["input"] = msgspec.json.decode(self._input) if self._input else {}
            self._input = ""
        if keep:
            self.blocks.append(block)
        return [*events, {"type": "content_block_stop", "index": self._num_blocks - 1}]

    def _add(self, kind: str, text: str) -> list[dict[str, Any]]:
        events = self._begin({"type": kind, kind: ""}) if self._open is None or self._open["type"] != kind else []
        assert self._open is not None
        self._open[kind] += text
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _add_thinking(self, text: str) -> list[dict[str, Any]]:
        if not self._show_thinking:
            return []
        events = []
        if self._open is None or self._open["type"] != "thinking":
            events = self._begin({"type": "thinking", "thinking": "", "signature": ""})
            self._thought = ""
        self._thought += text
        return events if self._omit_thinking else events + self._add("thinking", text)

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        events = self.end()
        self._open = block
        self._num_blocks += 1
        return [*events, {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": dict(block)}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}


def _sign(thought: str) -> str:
    """A block of thinking must carry a text that clients send back unread; here it is a sum over the words."""
    return hashlib.sha256(thought.encode(errors="surrogatepass")).hexdigest()
