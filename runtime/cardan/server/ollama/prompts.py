"""Ollama's conversations and templates, in the form that the rest of the server takes.

It knows no engine and no HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from cardan.errors import RequestError
from cardan.server.ollama.bodies import read_call, read_message
from cardan.server.openai.tools import MAX_CALLS

_PLACES = ("System", "Prompt", "Response")


@dataclass(slots=True)
class _Reader:
    """Messages read so far, and calls that wait for their results: Ollama's have no ids."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[tuple[str, str]] = field(default_factory=list)
    num_calls: int = 0

    def add(self, item: object, where: str) -> None:
        """Read the next message."""
        message = read_message(item, where)
        read: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking:
            read["reasoning_content"] = message.thinking
        if message.tool_calls:
            if len(message.tool_calls) > MAX_CALLS:
                raise RequestError(
                    f"'{where}.tool_calls' may hold at most {MAX_CALLS} calls, got {len(message.tool_calls)}.",
                    param=f"{where}.tool_calls",
                )
            read["tool_calls"] = [
                self._read_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
            ]
        if message.role == "tool":
            read["tool_call_id"] = message.tool_call_id or self._answered(message.tool_name, where)
        self.messages.append(read)

    def _read_call(self, item: object, where: str) -> dict[str, Any]:
        call_id, name, arguments = read_call(item, where)
        call_id = call_id or f"call_{self.num_calls}"
        self.num_calls += 1
        self.waiting.append((call_id, name))
        function = {"name": name, "arguments": msgspec.json.encode(arguments).decode()}
        return {"id": call_id, "type": "function", "function": function}

    def _answered(self, name: str | None, where: str) -> str:
        """Id of the first call that waits, of a function where it is named."""
        for call in self.waiting:
            if name in (None, call[1]):
                self.waiting.remove(call)
                return call[0]
        which = "" if name is None else f" of {name[:60]!r}"
        raise RequestError(
            f"'{where}' is the result of a tool, but no call{which} in an earlier message of the assistant waits for "
            "one. Send the message whose 'tool_calls' it answers.",
            param=where,
        )


def read_conversation(items: list[Any]) -> list[dict[str, Any]]:
    """Messages as OpenAI's chat takes them.

    Raises:
        RequestError: a message is wrong.
    """
    reader = _Reader()
    for i, item in enumerate(items):
        reader.add(item, f"messages[{i}]")
    return reader.messages


def fill_template(template: str, prompt: str, system: str) -> str:
    """A template with its places filled, up to where the answer begins.

    Raises:
        RequestError: it has more in it than ``{{ .System }}``, ``{{ .Prompt }}`` and ``{{ .Response }}``.
    """
    values = {"System": system, "Prompt": prompt}
    pieces, at = [], 0
    while (begin := template.find("{{", at)) >= 0 and (end := template.find("}}", begin)) >= 0:
        action = template[begin + 2 : end].removeprefix("-").removesuffix("-").strip()
        name = action.removeprefix(".")
        if not action.startswith(".") or name not in _PLACES:
            raise RequestError(
                f"'template' has {template[begin : end + 2][:60]!r} in it; only {{{{ .System }}}}, {{{{ .Prompt }}}} "
                'and {{ .Response }} are filled. Build the prompt yourself and send it with "raw": true.',
                param="template",
                code="unsupported_parameter",
            )
        pieces.append(template[at:begin])
        at = end + 2
        if name == "Response":
            return "".join(pieces)
        pieces.append(values[name])
    return "".join([*pieces, template[at:]])
