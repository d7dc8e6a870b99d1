"""Answers as items of the responses API: reasoning, messages and function calls, whole and as events of a stream.

It knows no engine and no HTTP.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from cardan.parsers import CallArguments, CallDropped, CallEnd, CallStart, Content, Event, Reasoning

Logprobs = list[dict[str, Any]]


class ItemWriter:
    """Turns what a parser finds into items; the events of a stream and the whole items say the same.

    A call that breaks off has begun in a stream already: its item ends there as ``incomplete``, and what the model
    wrote of it follows as a message. The finished response leaves the item out.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._num_items = 0
        self._text = ""
        self._logprobs: Logprobs = []
        self._held: Logprobs = []

    def write(self, found: Iterable[Event], logprobs: Logprobs | None = None) -> list[dict[str, Any]]:
        """The stream's next events, without their numbers.

        Args:
            found: by the parser.
            logprobs: of the tokens behind it; they go with the first words. Those of tokens behind which nothing is
                found yet (a part of a character, say) wait for what comes.
        """
        events: list[dict[str, Any]] = []
        self._held += logprobs or []
        for item in found:
            held = self._held
            self._held = []
            match item:
                case Content(text):
                    events += self._add_text(text, held)
                case Reasoning(text):
                    events += self._add_thought(text)
                case CallStart(_, call_id, name):
                    call = {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
                    events += self._begin({"id": f"fc_{uuid.uuid4().hex}", **call})
                case CallArguments(_, text):
                    self._text += text
                    events.append(self._event("function_call_arguments.delta", delta=text))
                case CallEnd():
                    events += self.end()
                case CallDropped():
                    events += self._drop()
        return events

    def end(self, status: str = "completed") -> list[dict[str, Any]]:
        """End the item that is open, if one is."""
        events = []
        if self._held and self._open is not None and self._open["type"] == "message":
            # The last tokens may have no text of their own.
            events += self._add_text("", self._held)
        self._held = []
        item, self._open = self._open, None
        if item is None:
            return []
        text, self._text = self._text, ""
        item["status"] = status
        place = self._place(item)
        if item["type"] == "function_call":
            item["arguments"] = text
            events.append({"type": "response.function_call_arguments.done", **place, "arguments": text})
        else:
            part = self._part(item, text)
            item["content"] = [part]
            name = "output_text" if item["type"] == "message" else "reasoning_text"
            done: dict[str, Any] = {"type": f"response.{name}.done", **place, "content_index": 0, "text": text}
            if item["type"] == "message":
                done["logprobs"] = self._logprobs
            events.append(done)
            events.append({"type": "response.content_part.done", **place, "content_index": 0, "part": part})
        self._logprobs = []
        self.items.append(item)
        done_item = {"type": "response.output_item.done", "output_index": place["output_index"], "item": dict(item)}
        return [*events, done_item]

    def _drop(self) -> list[dict[str, Any]]:
        item = self._open
        events = self.end("incomplete")
        if item is not None:
            self.items.pop()
        return events

    def _add_text(self, text: str, logprobs: Logprobs) -> list[dict[str, Any]]:
        events = []
        if self._open is None or self._open["type"] != "message":
            head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "content": []}
            events = self._begin(head)
        self._text += text
        self._logprobs += logprobs
        return [*events, self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)]

    def _add_thought(self, text: str) -> list[dict[str, Any]]:
        events = []
        if self._open is None or self._open["type"] != "reasoning":
            events = self._begin({"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": [], "content": []})
        self._text += text
        return [*events, self._event("reasoning_text.delta", content_index=0, delta=text)]

    def _begin(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        events = self.end()
        self._open = {**item, "status": "in_progress"}
        self._num_items += 1
        added = {"type": "response.output_item.added", "output_index": self._num_items - 1, "item": dict(self._open)}
        events.append(added)
        if item["type"] != "function_call":
            events.append(self._event("content_part.added", content_index=0, part=self._part(item, "")))
        return events

    def _part(self, item: dict[str, Any], text: str) -> dict[str, Any]:
        if item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        assert self._open is not None
        return {"type": f"response.{name}", **self._place(self._open), **fields}

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": self._num_items - 1}
