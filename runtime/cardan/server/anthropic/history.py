"""Conversations in Anthropic's form: messages made of blocks become the messages that chat templates take.

It knows no engine and no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cardan.errors import RequestError
from cardan.server.anthropic.bodies import CACHE_CONTROL
from cardan.server.http.bodies import Body, Refusal, is_anything, is_one_of, parse_body

_CITATIONS = Refusal("documents are not cited.", is_one_of([]))
_BLOCK_REFUSED: Mapping[str, Refusal] = {
    "cache_control": CACHE_CONTROL,
    "citations": _CITATIONS,
    "caller": Refusal("only the model calls tools.", is_anything),
}
_MESSAGE_REFUSED: Mapping[str, Refusal] = {"cache_control": CACHE_CONTROL}
_ROLES = ("user", "assistant", "system")
_ALLOWED = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
}
_MEDIA = ("image", "document", "search_result", "container_upload")


class MessageItem(Body):
    """One message."""

    role: str
    content: Any


class TextBlock(Body):
    """Words."""

    type: str
    text: str


class ThinkingBlock(Body):
    """What the model thought earlier; its signature is not looked at."""

    type: str
    thinking: str
    signature: str | None = None


class ToolUseBlock(Body):
    """A call that the model made earlier."""

    type: str
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Body):
    """What a call gave."""

    type: str
    tool_use_id: str
    content: Any = None
    is_error: bool = False


@dataclass(slots=True)
class _Reader:
    """Messages read so far, and the calls in them that may be answered."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    known_calls: set[str] = field(default_factory=set)

    def add(self, item: object, where: str) -> None:
        """Read the next message."""
        if not isinstance(item, dict):
            raise RequestError(f"'{where}' must be an object with 'role' and 'content'.", param=where)
        message = parse_body(MessageItem, item, _MESSAGE_REFUSED, prefix=f"{where}.")
        if message.role not in _ROLES:
            raise RequestError(
                f"'{where}.role' is {message.role[:40]!r}; it must be one of {', '.join(_ROLES)}.",
                param=f"{where}.role",
                code="invalid_value",
            )
        blocks = _blocks(message.content, f"{where}.content")
        if message.role == "assistant":
            self._add_assistant(blocks)
        else:
            self._add_other(message.role, blocks)

    def _add_assistant(self, blocks: list[tuple[str, dict[str, Any]]]) -> None:
        """Words of several blocks are joined, and so are messages of the assistant that follow each other."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant":
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        for where, block in blocks:
            kind = _kind_of(block, "assistant", where)
            if kind == "text":
                last["content"] += parse_body(TextBlock, block, _BLOCK_REFUSED, prefix=f"{where}.").text
            elif kind == "thinking":
                thought = parse_body(ThinkingBlock, block, _BLOCK_REFUSED, prefix=f"{where}.").thinking
                last["reasoning_content"] = last.get("reasoning_content", "") + thought
            else:
                call = parse_body(ToolUseBlock, block, _BLOCK_REFUSED, prefix=f"{where}.")
                self.known_calls.add(call.id)
                function = {"name": call.name, "arguments": msgspec.json.encode(call.input).decode()}
                last.setdefault("tool_calls", []).append({"id": call.id, "type": "function", "function": function})

    def _add_other(self, role: str, blocks: list[tuple[str, dict[str, Any]]]) -> None:
        """Results of tools become messages of their own, in the order that they stand in."""
        for where, block in blocks:
            if _kind_of(block, role, where) == "text":
                text = parse_body(TextBlock, block, _BLOCK_REFUSED, prefix=f"{where}.").text
                self.add_text(role, text)
            else:
                self._add_result(block, where)

    def add_text(self, role: str, text: str) -> None:
        """Add words; those of one role that follow each other are one message."""
        if self.messages and self.messages[-1]["role"] == role:
            self.messages[-1]["content"] += "\n" + text
        else:
            self.messages.append({"role": role, "content": text})

    def _add_result(self, block: dict[str, Any], where: str) -> None:
        result = parse_body(ToolResultBlock, block, _BLOCK_REFUSED, prefix=f"{where}.")
        if result.tool_use_id not in self.known_calls:
            raise RequestError(
                f"'{where}.tool_use_id' is {result.tool_use_id[:60]!r}, but no earlier message of the assistant has a "
                "'tool_use' block with that 'id'.",
                param=f"{where}.tool_use_id",
                code="invalid_value",
            )
        text = "" if result.content is None else join_texts(result.content, f"{where}.content")
        if result.is_error:
            text = f"Error: {text}" if text else "Error"
        self.messages.append({"role": "tool", "tool_call_id": result.tool_use_id, "content": text})


def read_conversation(messages: list[Any], system: object) -> list[dict[str, Any]]:
    """Messages as OpenAI's chat takes them.

    Raises:
        RequestError: a message is wrong, or holds what is not supported.
    """
    if not messages:
        raise RequestError("'messages' is empty; send at least one message.", param="messages")
    reader = _Reader()
    if system is not None and system != []:
        reader.add_text("system", join_texts(system, "system"))
    for i, item in enumerate(messages):
        reader.add(item, f"messages[{i}]")
    return reader.messages


def join_texts(content: object, where: str) -> str:
    """A string, or text blocks that are joined line by line.

    Raises:
        RequestError: it is neither.
    """
    texts = []
    for place, block in _blocks(content, where):
        _kind_of(block, "system", place)
        texts.append(parse_body(TextBlock, block, _BLOCK_REFUSED, prefix=f"{place}.").text)
    return "\n".join(texts)


def _blocks(content: object, where: str) -> list[tuple[str, dict[str, Any]]]:
    """Blocks with their places; a string is one block of text."""
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})]
    if not isinstance(content, list) or not content:
        raise RequestError(f"'{where}' must be a string, or a list of blocks.", param=where, code="invalid_value")
    blocks = []
    for i, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise RequestError(
                f'\'{where}[{i}]\' must be an object like {{"type": "text", "text": "…"}}.', param=f"{where}[{i}]"
            )
        blocks.append((f"{where}[{i}]", block))
    return blocks


def _kind_of(block: dict[str, Any], role: str, where: str) -> str:
    """The block's type, where messages of a role may have it."""
    kind: str = block["type"]
    if kind in _ALLOWED[role]:
        return kind
    what = f"'{where}' has type {kind[:40]!r}"
    reason = f"; here only {', '.join(_ALLOWED[role])} may stand."
    if kind in _MEDIA:
        reason = ", but only text is taken. Put what the model needs into text."
    elif kind == "redacted_thinking":
        reason = ", which only Anthropic's service can read. Leave the block out."
    raise RequestError(what + reason, param=where, code="unsupported_parameter")
