"""Body of OpenAI's responses API: the fields that work, and the ones that are refused or ask for nothing.

It knows no engine and does not look into the input; ``responses.input`` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from cardan.errors import RequestError
from cardan.server.http.bodies import Body, Refusal, Texts, is_anything, is_one_of, parse_body
from cardan.server.openai.tools import MAX_TOOLS
from cardan.server.sampling import MAX_TOKENS, MAX_TOP_LOGPROBS

_LABEL = Refusal("it only labels a request.", is_anything)

RESPONSES_REFUSED: Mapping[str, Refusal] = {
    "user": _LABEL,
    "safety_identifier": _LABEL,
    "prompt_cache_key": _LABEL,
    "prompt_cache_retention": Refusal("prefixes are cached as long as there is room.", is_anything),
    "max_tool_calls": Refusal("the server calls no tools itself.", is_anything),
    "service_tier": Refusal("there is one tier; send 'auto' or leave it out.", is_one_of("auto", "default")),
    "conversation": Refusal("send 'previous_response_id', or the whole conversation as 'input'."),
    "prompt": Refusal("templates of prompts are not kept; send 'instructions' and 'input'."),
    "messages": Refusal("this route takes 'input'; /v1/chat/completions takes 'messages'."),
    "max_tokens": Refusal("use 'max_output_tokens' on this route."),
    "max_completion_tokens": Refusal("use 'max_output_tokens' on this route."),
    "response_format": Refusal("use 'text' with 'format' on this route."),
    "reasoning_effort": Refusal("use 'reasoning' with 'effort' on this route."),
    "n": Refusal("a response is one answer.", is_one_of(1)),
}

_INCLUDABLE = ("message.output_text.logprobs", "reasoning.encrypted_content")

MAX_METADATA = 16


def _as_metadata(value: object) -> object:
    """Entries are counted before each is looked at."""
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise ValueError(f"may have at most {MAX_METADATA} entries, got {len(value)}.")
    return value


class ResponsesBody(Body):
    """Body of ``/v1/responses``."""

    model: str | None = None
    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    previous_response_id: str | None = None
    store: bool = True
    background: bool = False
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    include: Texts = Field(default_factory=list)
    metadata: Annotated[dict[str, str], BeforeValidator(_as_metadata)] = Field(default_factory=dict)
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    tools: list[Any] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: dict[str, Any] = Field(default_factory=dict)
    reasoning: dict[str, Any] = Field(default_factory=dict)
    truncation: Literal["disabled", "auto"] = "disabled"

    @property
    def wants_logprobs(self) -> bool:
        """Whether texts carry logprobs."""
        return bool(self.top_logprobs) or _INCLUDABLE[0] in self.include


class _Text(Body):
    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class _Reasoning(Body):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class _Tool(Body):
    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Choice(Body):
    type: Literal["function"]
    name: str


class _Options(Body):
    include_obfuscation: Literal[False] | None = None


def read_effort(body: ResponsesBody) -> str | None:
    """How much the model reasons.

    Raises:
        RequestError: ``reasoning`` is wrong.
    """
    refused = {"generate_summary": Refusal("reasoning is told as it is.", is_anything)}
    return parse_body(_Reasoning, body.reasoning, refused, prefix="reasoning.").effort


def check_body(body: ResponsesBody) -> None:
    """Check what hangs together.

    Raises:
        RequestError: two fields contradict each other, or one asks for what is not served.
    """
    if body.stream_options is not None:
        if not body.stream:
            raise RequestError("'stream_options' needs \"stream\": true.", param="stream_options")
        parse_body(_Options, body.stream_options, prefix="stream_options.")
    if body.background and not body.store:
        raise RequestError("'background' needs \"store\": true: its response is fetched later.", param="background")
    if body.background and body.stream:
        raise RequestError("'background' and 'stream' cannot be had together. Drop one.", param="background")
    if body.truncation == "auto":
        raise RequestError(
            "'truncation' is 'auto', but items are not dropped from a conversation. Send 'disabled', and what fits.",
            param="truncation",
            code="unsupported_parameter",
        )
    for name in body.include:
        if name not in _INCLUDABLE:
            raise RequestError(
                f"'include' holds {name[:60]!r}; only {', '.join(_INCLUDABLE)} can be included.", param="include"
            )


def chat_fields(body: ResponsesBody) -> dict[str, Any]:
    """Fields of an OpenAI chat that say the same as those of this body, but for messages and reasoning.

    Raises:
        RequestError: a field is wrong.
    """
    fields: dict[str, Any] = {
        "model": body.model,
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "parallel_tool_calls": body.parallel_tool_calls,
        "tool_choice": _read_choice(body.tool_choice),
    }
    if body.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.tools:
        fields["tools"] = [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools[: MAX_TOOLS + 1])]
    text = parse_body(_Text, body.text, prefix="text.")
    if text.format is not None:
        fields["response_format"] = _read_format(text.format)
    return fields


def _read_tool(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f'\'{where}\' must be an object like {{"type": "function", "name": "…"}}.', param=where)
    kind = value.get("type")
    if isinstance(kind, str) and kind != "function":
        raise RequestError(
            f"'{where}.type' is {kind[:40]!r}; only functions can be called, and the client runs them.",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    tool = parse_body(_Tool, value, prefix=f"{where}.")
    given = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    function = {"name": tool.name, **{name: value for name, value in given.items() if value is not None}}
    return {"type": "function", "function": function}


def _read_choice(value: str | dict[str, Any]) -> Any:
    if isinstance(value, str):
        return value
    choice = parse_body(_Choice, value, prefix="tool_choice.")
    return {"type": "function", "function": {"name": choice.name}}


def _read_format(value: Mapping[str, Any]) -> dict[str, Any]:
    """``text.format`` keeps a schema's fields beside its type, ``response_format`` one level below."""
    kind = value.get("type")
    if kind != "json_schema":
        return dict(value)
    return {"type": kind, "json_schema": {name: item for name, item in value.items() if name != "type"}}
