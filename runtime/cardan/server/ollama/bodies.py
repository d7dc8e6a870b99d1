"""Bodies of Ollama's routes: the fields that work, and the ones that are refused or ask for nothing.

It knows no engine but for what it serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from cardan.engine.api import EngineInfo
from cardan.errors import RequestError
from cardan.server.http.bodies import Body, Refusal, is_anything, is_one_of, parse_body
from cardan.server.sampling import MAX_TOKENS, MAX_TOP_LOGPROBS, Strings, as_seed

_LOADING = Refusal("how the model is loaded was decided when the server was started; leave it out.")
_IMAGES = Refusal("only text is taken.", is_one_of([]))
_SHARED_REFUSED: Mapping[str, Refusal] = {
    "keep_alive": Refusal("the model stays loaded.", is_anything),
    "truncate": Refusal("messages are not dropped from a conversation; send what fits.", is_one_of(False)),
    "shift": Refusal("nothing is dropped from a full context; the answer ends there.", is_one_of(False)),
}

CHAT_REFUSED: Mapping[str, Refusal] = {
    **_SHARED_REFUSED,
    "prompt": Refusal("this route takes 'messages'; /api/generate takes 'prompt'."),
    "images": _IMAGES,
}

GENERATE_REFUSED: Mapping[str, Refusal] = {
    **_SHARED_REFUSED,
    "messages": Refusal("this route takes 'prompt'; /api/chat takes 'messages'."),
    "suffix": Refusal("filling in the middle is not available; put what the model needs into 'prompt'.", is_one_of("")),
    "images": _IMAGES,
    "context": Refusal("send the conversation to /api/chat; its cached prefix is reused.", is_one_of([])),
    "width": Refusal("only text is made."),
    "height": Refusal("only text is made."),
    "steps": Refusal("only text is made."),
}

_OPTIONS_REFUSED: Mapping[str, Refusal] = {
    **dict.fromkeys(
        (
            "numa",
            "num_batch",
            "num_gpu",
            "main_gpu",
            "low_vram",
            "f16_kv",
            "logits_all",
            "vocab_only",
            "use_mmap",
            "use_mlock",
            "embedding_only",
            "num_thread",
        ),
        _LOADING,
    ),
    "num_keep": Refusal("nothing is dropped from a full context.", is_anything),
    "repeat_last_n": Refusal("penalties look at the whole sequence; send -1 or leave it out.", is_one_of(-1)),
    "tfs_z": Refusal("tail-free sampling is not available.", is_one_of(1, 1.0)),
    "typical_p": Refusal("typical sampling is not available.", is_one_of(1, 1.0)),
    "mirostat": Refusal("mirostat is not available.", is_one_of(0)),
    "mirostat_tau": Refusal("mirostat is not available.", is_anything),
    "mirostat_eta": Refusal("mirostat is not available.", is_anything),
    "penalize_newline": Refusal("penalties look at all tokens.", is_one_of(True)),
}


def as_top_k(value: object) -> object:
    """A whole number; 0 and -1 stand for the whole vocabulary."""
    if type(value) is not int or value < -1 or value > MAX_TOKENS:
        raise ValueError(f"must be a whole number from -1 on, got {str(value)[:20]}.")
    return value or -1


class Options(Body):
    """``options``: how tokens are chosen and where the output stops."""

    num_predict: Annotated[int, Field(ge=-2, le=MAX_TOKENS)] = -1
    num_ctx: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int | None, BeforeValidator(as_top_k, json_schema_input_type=int | None)] = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int | None, BeforeValidator(as_seed, json_schema_input_type=int | None)] = None
    stop: Strings = ()
    repeat_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None

    @property
    def limit(self) -> int | None:
        """The most output tokens; None for what the context leaves."""
        return None if self.num_predict < 0 else self.num_predict

    def fields(self) -> dict[str, Any]:
        """Fields of an OpenAI body that say the same, but for the limits."""
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty")
        fields = {name: getattr(self, name) for name in names}
        fields["repetition_penalty"] = self.repeat_penalty
        fields["stop"] = list(self.stop) or None
        return {name: value for name, value in fields.items() if value is not None}


class OllamaBody(Body):
    """What both generating routes share. Answers are streamed unless the body says otherwise."""

    model: Annotated[str, Field(min_length=1)]
    stream: bool = True
    format: Any = None
    options: dict[str, Any] = Field(default_factory=dict)
    think: Any = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0

    def read_options(self, info: EngineInfo) -> Options:
        """The options.

        Raises:
            RequestError: one is wrong, or asks for a longer context than is served.
        """
        options = parse_body(Options, self.options, _OPTIONS_REFUSED, prefix="options.")
        if options.num_predict == 0:
            raise RequestError("'options.num_predict' must be at least 1, or -1 for no limit.", param="options")
        if options.num_ctx is not None and options.num_ctx > info.context_length:
            raise RequestError(
                f"'options.num_ctx' is {options.num_ctx}, but this server serves a context of {info.context_length} "
                "tokens. Leave it out, or start the server with --context-length.",
                param="options.num_ctx",
                code="invalid_value",
            )
        return options

    def format_fields(self) -> dict[str, Any]:
        """``format`` as OpenAI's ``response_format``.

        Raises:
            RequestError: it is neither ``json`` nor a schema.
        """
        if self.format is None or self.format == "":
            return {}
        if self.format == "json":
            return {"response_format": {"type": "json_object"}}
        if isinstance(self.format, dict):
            schema = {"name": "output", "schema": self.format}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        raise RequestError("'format' must be 'json' or a JSON schema (an object).", param="format")


class ChatBody(OllamaBody):
    """Body of ``/api/chat``."""

    messages: list[Any] = Field(default_factory=list)
    tools: list[Any] = Field(default_factory=list)


class GenerateBody(OllamaBody):
    """Body of ``/api/generate``."""

    prompt: str = ""
    system: str | None = None
    template: str | None = None
    raw: bool = False


class ShowBody(Body):
    """Body of ``/api/show``; ``model`` and ``name`` mean the same."""

    model: str | None = None
    name: str | None = None
    verbose: bool = False


class _Message(Body):
    role: str
    content: str = ""
    thinking: str | None = None
    tool_calls: list[Any] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class _Call(Body):
    function: dict[str, Any]
    id: str | None = None
    type: str | None = None


class _Called(Body):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: int | None = None
    description: str | None = None


def read_message(item: object, where: str) -> _Message:
    """One message.

    Raises:
        RequestError: it is wrong.
    """
    if not isinstance(item, dict):
        raise RequestError(f"'{where}' must be an object with 'role' and 'content'.", param=where)
    return parse_body(_Message, item, {"images": _IMAGES}, prefix=f"{where}.")


def read_call(item: object, where: str) -> tuple[str | None, str, dict[str, Any]]:
    """Id, name and arguments of a call in a message of the history.

    Raises:
        RequestError: it is wrong.
    """
    if not isinstance(item, dict):
        raise RequestError(f"'{where}' must be an object with a 'function'.", param=where)
    call = parse_body(_Call, item, prefix=f"{where}.")
    called = parse_body(_Called, call.function, prefix=f"{where}.function.")
    return call.id, called.name, called.arguments
