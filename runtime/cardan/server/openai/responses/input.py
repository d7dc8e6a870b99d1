"""Items of the responses API become the messages that chat templates take.

It knows no engine and no HTTP.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from cardan.errors import RequestError
from cardan.server.http.bodies import Body, Refusal, is_anything, is_one_of, parse_body

_MINE: Mapping[str, Refusal] = {
    # Items that were answers before carry these.
    "id": Refusal("items are known by their place.", is_anything),
    "status": Refusal("what is sent is taken as complete.", is_anything),
    "phase": Refusal("it changes nothing.", is_anything),
}
_PART_REFUSED: Mapping[str, Refusal] = {
    "annotations": Refusal("annotations are not shown to the model.", is_anything),
    "logprobs": Refusal("logprobs are not shown to the model.", is_anything),
}
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_ROLES = ("user", "assistant", "system", "developer")


class _Message(Body):
    role: str
    content: Any
    type: str = "message"


class _Call(Body):
    type: str
    call_id: str
    name: str
    arguments: str


class _CallOutput(Body):
    type: str
    call_id: str
    output: Any


class _Thought(Body):
    type: str
    summary: list[Any] = Field(default_factory=list)
    content: list[Any] | None = None


class _Part(Body):
    type: str
    text: str


@dataclass(slots=True)
class _Reader:
    messages: list[dict[str, Any]] = field(default_factory=list)

    def add(self, item: object, where: str) -> None:
        """Read the next item."""
        if not isinstance(item, dict):
            raise RequestError(f"'{where}' must be an object.", param=where)
        kind = item.get("type") or "message"
        if kind == "message":
            self._add_message(item, where)
        elif kind == "function_call":
            call = parse_body(_Call, item, _MINE, prefix=f"{where}.")
            function = {"name": call.name, "arguments": call.arguments}
            made = {"id": call.call_id, "type": "function", "function": function}
            self._assistant().setdefault("tool_calls", []).append(made)
        elif kind == "function_call_output":
            given = parse_body(_CallOutput, item, _MINE, prefix=f"{where}.")
            text = _text(given.output, f"{where}.output")
            self.messages.append({"role": "tool", "tool_call_id": given.call_id, "content": text})
        elif kind == "reasoning":
            self._add_thought(item, where)
        else:
            raise RequestError(
                f"'{where}.type' is {str(kind)[:40]!r}; only message, function_call, function_call_output and "
                "reasoning are taken.",
                param=f"{where}.type",
                code="unsupported_parameter",
            )

    def _add_message(self, item: dict[str, Any], where: str) -> None:
        message = parse_body(_Message, item, _MINE, prefix=f"{where}.")
        if message.role not in _ROLES:
            raise RequestError(
                f"'{where}.role' is {message.role[:40]!r}; it must be one of {', '.join(_ROLES)}.",
                param=f"{where}.role",
                code="invalid_value",
            )
        text = _text(message.content, f"{where}.content")
        if message.role == "assistant":
            self._assistant()["content"] += text
        else:
            self.messages.append({"role": message.role, "content": text})

    def _add_thought(self, item: dict[str, Any], where: str) -> None:
        refused = {**_MINE, "encrypted_content": Refusal("only the service that made it can read it.", is_one_of(""))}
        thought = parse_body(_Thought, item, refused, prefix=f"{where}.")
        text = (
            _text(thought.content or thought.summary, f"{where}.content") if thought.content or thought.summary else ""
        )
        if text:
            # A thought begins a turn of the assistant's.
            self.messages.append({"role": "assistant", "content": "", "reasoning_content": text})

    def _assistant(self) -> dict[str, Any]:
        """The assistant's message that is going on: its thought, words and calls are items of their own."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def read_input(value: str | list[Any]) -> list[dict[str, Any]]:
    """Messages as OpenAI's chat takes them.

    Raises:
        RequestError: an item is wrong, or of a kind that is not supported.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not value:
        raise RequestError("'input' is empty; send a text or at least one item.", param="input")
    reader = _Reader()
    for i, item in enumerate(value):
        reader.add(item, f"input[{i}]")
    return reader.messages


def listed_items(value: str | list[Any]) -> list[dict[str, Any]]:
    """The input as it is listed later: items with ids."""
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    return [_listed(item) for item in items]


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or "message"
    listed = {"id": f"{_PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}", **item, "type": kind}
    if kind == "message" and isinstance(item["content"], str):
        part = "output_text" if item["role"] == "assistant" else "input_text"
        listed["content"] = [{"type": part, "text": item["content"]}]
    return listed


_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def _text(content: object, where: str) -> str:
    """A string, or parts of text that are joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError(f"'{where}' must be a string, or a list of text parts.", param=where, code="invalid_value")
    texts = []
    for i, part in enumerate(content):
        place = f"{where}[{i}]"
        if not isinstance(part, dict) or part.get("type") not in _TEXTS:
            kind = part.get("type") if isinstance(part, dict) else part
            raise RequestError(
                f'\'{place}\' has type {str(kind)[:40]!r}; only parts like {{"type": "input_text", "text": "…"}} '
                "are taken.",
                param=place,
                code="unsupported_parameter",
            )
        texts.append(parse_body(_Part, part, _PART_REFUSED, prefix=f"{place}.").text)
    return "".join(texts)
