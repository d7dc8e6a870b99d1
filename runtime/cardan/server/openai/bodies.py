"""Bodies of OpenAI's routes: the fields that work, and the ones that are refused or asked for nothing.

It knows no engine; a field that stands in no table here is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from cardan.errors import RequestError
from cardan.server.http.bodies import Body, Refusal, is_anything, is_one_of, parse_body
from cardan.server.openai.tools import LEGACY, read_calls
from cardan.server.sampling import MAX_TOP_LOGPROBS, Count, Priority, SamplingBody

_LABEL = Refusal("it only labels a request.", is_anything)
_AUDIO = Refusal("only text is produced.", is_one_of(["text"], []))
_REASONING = Refusal("send 'reasoning_effort', or what the model's chat template reads in 'chat_template_kwargs'.")


_SHARED_REFUSED: Mapping[str, Refusal] = {
    # These ask for nothing that would change the answer.
    "user": _LABEL,
    "metadata": _LABEL,
    "safety_identifier": _LABEL,
    "prompt_cache_key": _LABEL,
    "store": Refusal("answers are not kept.", is_one_of(False)),
    "service_tier": Refusal("there is one tier; send 'auto' or leave it out.", is_one_of("auto", "default")),
    # These would change it.
    "lora_path": Refusal("adapters are not available; the base model answers when the field is left out."),
    "custom_params": Refusal("give a logit processor's parameters in 'custom_logit_processor.params'."),
    "session_params": Refusal("sessions are not available; send the whole prompt, its cached prefix is reused."),
}

CHAT_REFUSED: Mapping[str, Refusal] = {
    **_SHARED_REFUSED,
    "functions": LEGACY,
    "function_call": LEGACY,
    "modalities": _AUDIO,
    "audio": _AUDIO,
    "prediction": Refusal("predicted outputs are not available."),
    "web_search_options": Refusal("the server does not search the web."),
    "reasoning": _REASONING,
    "thinking": _REASONING,
    "verbosity": Refusal("ask for it in the prompt.", is_one_of("medium")),
    "prompt": Refusal("this route takes 'messages'; /v1/completions takes 'prompt'."),
    "max_new_tokens": Refusal("use 'max_completion_tokens' or 'max_tokens'."),
    "echo": Refusal("only /v1/completions can repeat the prompt.", is_one_of(False)),
    "best_of": Refusal("use 'n'.", is_one_of(1)),
}

COMPLETION_REFUSED: Mapping[str, Refusal] = {
    **_SHARED_REFUSED,
    "suffix": Refusal("filling in the middle is not available; put what the model needs into 'prompt'.", is_one_of("")),
    "messages": Refusal("this route takes 'prompt'; /v1/chat/completions takes 'messages'."),
    "max_completion_tokens": Refusal("use 'max_tokens' on this route."),
    "max_new_tokens": Refusal("use 'max_tokens'."),
    "top_logprobs": Refusal("on this route 'logprobs' is the number of alternatives."),
    "chat_template_kwargs": Refusal("no chat template is used on this route.", is_one_of({})),
}

_MESSAGE_REFUSED: Mapping[str, Refusal] = {
    "function_call": LEGACY,
    "audio": _AUDIO,
    "parsed": Refusal("send 'content' alone.", is_anything),
    "refusal": Refusal("put the text into 'content'."),
    "annotations": Refusal("annotations are not shown to the model.", is_one_of([])),
}

_PART_REASON = Refusal("only text is taken.")
_PART_REFUSED: Mapping[str, Refusal] = dict.fromkeys(
    ("image_url", "input_audio", "video_url", "audio_url", "file", "refusal"), _PART_REASON
)

_RESERVED_KWARGS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


def as_template_kwargs(value: object) -> object:
    """Variables for the chat template; those that the server sets itself cannot be overridden."""
    if not isinstance(value, dict):
        raise ValueError("must be an object.")
    for name in value:
        if name in _RESERVED_KWARGS or not str(name).isidentifier():
            raise ValueError(f"must not set {str(name)[:40]!r}.")
    return value


class StreamOptions(Body):
    """``stream_options``. Obfuscation pads chunks; only its absence is on offer.

    Attributes:
        include_usage: the stream ends with a chunk of usage.
        continuous_usage_stats: every other chunk has the usage so far.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False


class OpenAIBody(SamplingBody):
    """What both generating routes of OpenAI share."""

    model: str | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    min_tokens: Count | None = None
    min_new_tokens: Count | None = None
    priority: Priority = 0
    rid: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    cache_salt: str | None = None
    routing_key: str | None = None
    return_hidden_states: bool = False
    custom_logit_processor: Any = None

    def usage_in_stream(self) -> StreamOptions:
        """Where a stream tells usage.

        Raises:
            RequestError: ``stream_options`` is wrong, or stands without ``stream``.
        """
        if self.stream_options is None:
            return StreamOptions()
        if not self.stream:
            raise RequestError("'stream_options' needs \"stream\": true.", param="stream_options")
        refused = {"include_obfuscation": Refusal("chunks are never padded.", is_one_of(False))}
        options = parse_body(StreamOptions, self.stream_options, refused, prefix="stream_options.")
        if options.continuous_usage_stats and not options.include_usage:
            raise RequestError(
                "'stream_options.continuous_usage_stats' needs \"include_usage\": true.",
                param="stream_options.continuous_usage_stats",
            )
        return options

    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk; raises what ``usage_in_stream`` does."""
        return self.usage_in_stream().include_usage

    def minimum(self) -> int:
        """The fewest output tokens; ``min_tokens`` and ``min_new_tokens`` mean the same.

        Raises:
            RequestError: both are given and differ.
        """
        given = {value for value in (self.min_tokens, self.min_new_tokens) if value is not None}
        if len(given) > 1:
            raise RequestError("'min_tokens' and 'min_new_tokens' mean the same and differ.", param="min_tokens")
        return given.pop() if given else 0


class ChatBody(OpenAIBody):
    """Body of ``/v1/chat/completions``."""

    messages: list[Any]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(as_template_kwargs)] = Field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool = True

    def limit(self) -> int | None:
        """The most output tokens, or None where the request sets no limit.

        Raises:
            RequestError: it is 0, or both names of the limit are given and differ.
        """
        given = {value for value in (self.max_tokens, self.max_completion_tokens) if value is not None}
        if len(given) > 1:
            raise RequestError("'max_tokens' and 'max_completion_tokens' mean the same and differ.", param="max_tokens")
        if given == {0}:
            raise RequestError("'max_tokens' must be at least 1, got 0.", param="max_tokens", code="invalid_value")
        return given.pop() if given else None


class CompletionBody(OpenAIBody):
    """Body of ``/v1/completions``."""

    prompt: Any
    max_tokens: Count = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False
    best_of: Annotated[int, Field(ge=1)] | None = None


class Message(Body):
    """One message of a chat."""

    role: str
    content: Any = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None
    tool_call_id: str | None = None


class TextPart(Body):
    """One part of a message's content."""

    type: str
    text: str | None = None


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read_messages(items: list[Any]) -> list[dict[str, Any]]:
    """Messages in the form that chat templates take; ``developer`` is today's name of ``system``.

    Raises:
        RequestError: a message is wrong or asks for something unsupported.
    """
    if not items:
        raise RequestError("'messages' is empty; send at least one message.", param="messages")
    return [_read_message(item, f"messages[{i}]") for i, item in enumerate(items)]


def _read_message(item: object, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise RequestError(f"'{where}' must be an object with 'role' and 'content'.", param=where)
    message = parse_body(Message, item, _MESSAGE_REFUSED, prefix=f"{where}.")
    if message.role not in _ROLES:
        raise RequestError(
            f"'{where}.role' is {message.role[:40]!r}; it must be one of {', '.join(_ROLES)}.",
            param=f"{where}.role",
            code="invalid_value",
        )
    _check_owner(message, where)
    read: dict[str, Any] = {"role": _ROLES[message.role]}
    if message.tool_calls:
        # An answer that only calls has no words.
        read["content"] = "" if message.content is None else _read_content(message.content, f"{where}.content")
        read["tool_calls"] = read_calls(message.tool_calls, f"{where}.tool_calls")
    else:
        read["content"] = _read_content(message.content, f"{where}.content")
    optional = {
        "name": message.name,
        "reasoning_content": message.reasoning_content,
        "tool_call_id": message.tool_call_id,
    }
    read.update({name: value for name, value in optional.items() if value is not None})
    return read


def _check_owner(message: Message, where: str) -> None:
    """Fields that only one role's messages have."""
    owned = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}
    for name, role in owned.items():
        if getattr(message, name) and message.role != role:
            raise RequestError(
                f"'{where}.{name}' stands in a message of role '{message.role}'; only those of role '{role}' have it.",
                param=f"{where}.{name}",
                code="invalid_value",
            )
    if message.role == "tool" and not message.tool_call_id:
        raise RequestError(
            f"'{where}.tool_call_id' is required: a message of role 'tool' answers the call with this id.",
            param=f"{where}.tool_call_id",
            code="missing_required_parameter",
        )


def _read_content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError(f"'{where}' must be a string, or a list of text parts.", param=where, code="invalid_value")
    return "".join(_read_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _read_part(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise RequestError(f'\'{where}\' must be an object like {{"type": "text", "text": "…"}}.', param=where)
    read = parse_body(TextPart, part, _PART_REFUSED, prefix=f"{where}.")
    if read.type != "text" or read.text is None:
        raise RequestError(
            f"'{where}' has type {read.type[:40]!r}; only parts of type 'text' with a 'text' are taken.",
            param=where,
            code="unsupported_parameter",
        )
    return read.text
