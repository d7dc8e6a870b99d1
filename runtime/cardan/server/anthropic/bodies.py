"""Bodies of Anthropic's routes: the fields that work, and the ones that are refused or ask for nothing.

It knows no engine and does not look into messages; ``anthropic.history`` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from cardan.errors import RequestError
from cardan.server.http.bodies import Body, Refusal, is_anything, is_one_of, parse_body
from cardan.server.openai.tools import MAX_TOOLS
from cardan.server.sampling import MAX_TOKENS, Strings, as_top_k

_LABEL = Refusal("it only labels a request.", is_anything)
CACHE_CONTROL = Refusal("prefixes are cached without being asked.", is_anything)
_ELSEWHERE = Refusal("it names something that only Anthropic's own service has.")

MESSAGES_REFUSED: Mapping[str, Refusal] = {
    "metadata": _LABEL,
    "cache_control": CACHE_CONTROL,
    "service_tier": Refusal(
        "there is one tier; send 'auto' or leave it out.", is_one_of("auto", "standard_only", "standard")
    ),
    "speed": Refusal("there is one speed.", is_one_of("standard")),
    "inference_geo": _ELSEWHERE,
    "container": _ELSEWHERE,
    "mcp_servers": Refusal("the server calls no other servers; declare their tools in 'tools'.", is_one_of([])),
    "context_management": Refusal("the conversation is taken as it is; shorten it before it is sent."),
    "diagnostics": _ELSEWHERE,
    "user_profile_id": _ELSEWHERE,
    "workspace_id": _ELSEWHERE,
    "prompt": Refusal("this route takes 'messages'."),
    "max_tokens_to_sample": Refusal("use 'max_tokens'."),
    "output_format": Refusal("use 'output_config' with 'format'."),
}

TOOL_REFUSED: Mapping[str, Refusal] = {
    "cache_control": CACHE_CONTROL,
    "eager_input_streaming": Refusal("inputs are streamed as they come.", is_anything),
    "input_examples": Refusal("put examples into 'description'.", is_one_of([])),
    "allowed_callers": Refusal("tools are called by the model only.", is_one_of(["direct"])),
    "defer_loading": Refusal("all tools are shown to the model.", is_one_of(False)),
}


class ConversationBody(Body):
    """What counting and answering share: the conversation, and what the model may do."""

    model: str | None = None
    messages: list[Any]
    system: Any = None
    tools: list[Any] = Field(default_factory=list)
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessagesBody(ConversationBody):
    """Body of ``/v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    stream: bool = False
    stop_sequences: Strings = ()
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int | None, BeforeValidator(as_top_k, json_schema_input_type=int | None)] = None


class CountBody(ConversationBody):
    """Body of ``/v1/messages/count_tokens``."""


class Tool(Body):
    """A tool that the client runs."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    type: str = "custom"
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Body):
    """Whether and which tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    """The form of the answer; its ``schema`` is read apart, since a field of that name would hide a method."""

    type: Literal["json_schema"]


class OutputConfig(Body):
    """Form and effort of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


def read_thinking(body: ConversationBody) -> Thinking | None:
    """What the body says of thinking.

    Raises:
        RequestError: it is wrong.
    """
    return None if body.thinking is None else parse_body(Thinking, body.thinking, prefix="thinking.")


def read_output_config(body: ConversationBody) -> OutputConfig:
    """What the body says of the answer's form and effort.

    Raises:
        RequestError: it is wrong.
    """
    return parse_body(OutputConfig, body.output_config or {}, prefix="output_config.")


def shared_fields(body: ConversationBody) -> dict[str, Any]:
    """Fields of an OpenAI chat that say the same as those of this body, but for messages, sampling and reasoning.

    Raises:
        RequestError: a field is wrong.
    """
    fields: dict[str, Any] = {"model": body.model}
    if body.tools:
        fields["tools"] = [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools[: MAX_TOOLS + 1])]
    if body.tool_choice is not None:
        fields |= _read_choice(parse_body(ToolChoice, body.tool_choice, prefix="tool_choice."), body)
    config = read_output_config(body)
    if config.format is not None:
        fields["response_format"] = _read_format(config.format)
    return fields


def _read_tool(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"'{where}' must be an object with 'name' and 'input_schema'.", param=where)
    kind = value.get("type") or "custom"
    if kind != "custom":
        raise RequestError(
            f"'{where}.type' is {str(kind)[:40]!r}, a tool that Anthropic's service defines or runs. Here the client "
            "runs all tools: declare it with 'name', 'description' and 'input_schema'.",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    tool = parse_body(Tool, value, TOOL_REFUSED, prefix=f"{where}.")
    if tool.input_schema is None:
        raise RequestError(
            f"'{where}.input_schema' is required.", param=f"{where}.input_schema", code="missing_required_parameter"
        )
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    optional = {"description": tool.description, "strict": tool.strict}
    function.update({name: given for name, given in optional.items() if given is not None})
    return {"type": "function", "function": function}


def _read_choice(choice: ToolChoice, body: ConversationBody) -> dict[str, Any]:
    if not body.tools:
        if choice.type in ("auto", "none"):
            return {}
        raise RequestError("'tool_choice' needs 'tools' to choose from.", param="tool_choice")
    if (choice.type == "tool") != (choice.name is not None):
        raise RequestError(
            "'tool_choice.name' names the tool of the type 'tool', and stands with no other type.",
            param="tool_choice.name",
        )
    fields: dict[str, Any] = {"tool_choice": {"any": "required"}.get(choice.type, choice.type)}
    if choice.type == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _read_format(value: Mapping[str, Any]) -> dict[str, Any]:
    rest = dict(value)
    schema = rest.pop("schema", None)
    form = parse_body(OutputFormat, rest, prefix="output_config.format.")
    if not isinstance(schema, dict):
        raise RequestError(
            "'output_config.format.schema' must be a JSON schema (an object).", param="output_config.format.schema"
        )
    return {"type": form.type, "json_schema": {"name": "output", "schema": schema}}
