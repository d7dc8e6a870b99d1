"""Tools of OpenAI's chat API: which functions a request declares, which of them it wants called, and calls it shows.

It knows neither a model's format of calls nor its chat template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cardan.errors import RequestError
from cardan.server.http.bodies import Body, Refusal, is_one_of, parse_body, shorten, shown

MAX_TOOLS = 1024
"""Most functions of one request."""

MAX_CALLS = 1024
"""Most calls that one message of the history may show."""

_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)

_TOOL_REFUSED: Mapping[str, Refusal] = dict.fromkeys(
    ("custom", "file_search", "web_search", "mcp", "code_interpreter"),
    Refusal("only functions can be called; the client runs them."),
)

Mode = Literal["none", "auto", "required", "named"]


class FunctionBody(Body):
    """A function as ``tools`` declares it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class ToolBody(Body):
    """An entry of ``tools``."""

    type: str = "function"
    function: Any


class NameBody(Body):
    """A function by its name."""

    name: str


class ChoiceBody(Body):
    """``tool_choice`` as an object."""

    type: str
    function: Any = None


class CalledBody(Body):
    """What a message of the history calls."""

    name: str
    arguments: str = ""


class CallBody(Body):
    """A call in a message of the history."""

    id: str
    type: str = "function"
    function: Any
    index: int | None = None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions of one request and what it wants of them.

    Attributes:
        tools: as they were sent; what the chat template shows.
        schemas: JSON schemas of the parameters by name.
        mode: ``none``: none is called, and the model sees none; ``auto``: the model decides; ``required``: at least one
            is called; ``named``: one certain function is called.
        name: of that function.
        strict: names of functions whose arguments must fit their schema.
    """

    tools: tuple[dict[str, Any], ...] = ()
    schemas: Mapping[str, Mapping[str, Any]] | None = None
    mode: Mode = "none"
    name: str | None = None
    strict: frozenset[str] = frozenset()

    @property
    def wanted(self) -> bool:
        """Whether functions may be called."""
        return bool(self.tools) and self.mode != "none"

    @property
    def forced(self) -> bool:
        """Whether a function must be called."""
        return self.mode in ("required", "named")


def read_tool_use(tools: list[Any] | None, choice: object) -> ToolUse:
    """The functions of a request.

    Raises:
        RequestError: a declaration is wrong or of another kind than a function, or the choice names none of them.
    """
    mode, name = _read_choice(choice)
    if not tools:
        if mode in ("required", "named"):
            raise RequestError(
                "'tool_choice' asks for a call, but there are no 'tools'. Send some.", param="tool_choice"
            )
        return ToolUse()
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"'tools' may hold at most {MAX_TOOLS} tools, got {len(tools)}.", param="tools")
    functions = [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    schemas: dict[str, Mapping[str, Any]] = {}
    for index, function in enumerate(functions):
        if function.name in schemas:
            raise RequestError(
                f"'tools[{index}].function.name' is {shorten(function.name)!r}, as of another tool. "
                "Give each function a name of its own.",
                param=f"tools[{index}].function.name",
            )
        schemas[function.name] = function.parameters or {}
    if name is not None and name not in schemas:
        raise RequestError(
            f"'tool_choice' names the function {shorten(name)!r}, which is none of the 'tools': "
            f"{shorten(', '.join(schemas))}.",
            param="tool_choice",
        )
    strict = frozenset(function.name for function in functions if function.strict)
    return ToolUse(tuple(tools), schemas, mode or "auto", name, strict)


def _read_choice(choice: object) -> tuple[Mode | None, str | None]:
    if choice is None:
        return None, None
    if isinstance(choice, str) and choice in ("none", "auto", "required"):
        return choice, None  # type: ignore[return-value]
    if not isinstance(choice, dict):
        raise RequestError(
            f"'tool_choice' is {shown(choice)}; it must be 'none', 'auto', 'required', or "
            '{"type": "function", "function": {"name": "…"}}.',
            param="tool_choice",
            code="invalid_value",
        )
    body = parse_body(ChoiceBody, choice, _CHOICE_REFUSED, prefix="tool_choice.")
    if body.type != "function" or not isinstance(body.function, dict):
        raise RequestError(
            f"'tool_choice' is of type {shorten(body.type)!r}; only "
            '{"type": "function", "function": {"name": "…"}} can be chosen.',
            param="tool_choice",
            code="unsupported_parameter",
        )
    return "named", parse_body(NameBody, body.function, prefix="tool_choice.function.").name


_CHOICE_REFUSED: Mapping[str, Refusal] = {
    "allowed_tools": Refusal("send only the tools that may be called."),
    "custom": Refusal("only functions can be called."),
}


def _read_tool(tool: object, where: str) -> FunctionBody:
    if not isinstance(tool, dict):
        raise RequestError(
            f'\'{where}\' must be an object like {{"type": "function", "function": {{"name": "…"}}}}.', param=where
        )
    if isinstance(tool.get("type"), str) and tool["type"] != "function":
        raise RequestError(
            f"'{where}.type' is {shorten(tool['type'])!r}; only functions can be called, and the client runs them.",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    body = parse_body(ToolBody, tool, _TOOL_REFUSED, prefix=f"{where}.")
    if not isinstance(body.function, dict):
        raise RequestError(f"'{where}.function' must be an object with a 'name'.", param=f"{where}.function")
    function = parse_body(FunctionBody, body.function, prefix=f"{where}.function.")
    if not _NAME.fullmatch(function.name):
        raise RequestError(
            f"'{where}.function.name' is {shorten(function.name)!r}; it must have 1 to 128 characters, which are "
            "letters, digits, or one of _ - . : /.",
            param=f"{where}.function.name",
            code="invalid_value",
        )
    return function


def read_calls(calls: object, where: str) -> list[dict[str, Any]]:
    """Calls that a message of the history shows, in the form that chat templates take.

    Raises:
        RequestError: one is wrong.
    """
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise RequestError(f"'{where}' must be a list of at most {MAX_CALLS} calls.", param=where)
    return [_read_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _read_call(call: object, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise RequestError(f"'{where}' must be an object with 'id' and 'function'.", param=where)
    body = parse_body(CallBody, call, {"custom": Refusal("only functions can be called.")}, prefix=f"{where}.")
    if body.type != "function" or not isinstance(body.function, dict):
        raise RequestError(
            f"'{where}.function' must be an object with 'name' and 'arguments', and the call of type 'function'.",
            param=f"{where}.function",
        )
    function = parse_body(CalledBody, body.function, _CALLED_REFUSED, prefix=f"{where}.function.")
    return {
        "id": body.id,
        "type": "function",
        "function": {"name": function.name, "arguments": function.arguments},
    }


_CALLED_REFUSED: Mapping[str, Refusal] = {
    # OpenAI's client adds this to calls that it has read.
    "parsed_arguments": Refusal("send 'arguments' alone.", lambda _value: True),
}

LEGACY = Refusal("functions are declared in 'tools' and chosen by 'tool_choice'.", is_one_of([], "none", "auto"))
"""``functions`` and ``function_call``, which came before ``tools``."""
