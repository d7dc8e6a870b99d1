"""JSON schemas of what routes answer, by path, or by method and path where they differ.

Fields that an API may have beside these are left open. It knows no endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
YES_NO: Schema = {"type": "boolean"}
ANY_OBJECT: Schema = {"type": "object"}


def listed(items: Schema) -> Schema:
    """A list."""
    return {"type": "array", "items": items}


def one_of(*values: str) -> Schema:
    """One of a few words."""
    return {"type": "string", "enum": list(values)}


def maybe(schema: Schema) -> Schema:
    """Something, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def record(**fields: Schema) -> Schema:
    """An object that has these fields, and may have others."""
    return {"type": "object", "properties": fields, "required": list(fields)}


_USAGE = record(prompt_tokens=WHOLE, completion_tokens=WHOLE, total_tokens=WHOLE)
_MODEL = record(id=TEXT, object=one_of("model"), created=WHOLE, owned_by=TEXT, max_model_len=WHOLE)
_STATUS = record(status=TEXT)
_SUCCESS = record(success=YES_NO)
_CHAT_MESSAGE = record(role=one_of("assistant"), content=maybe(TEXT))
_GENERATED = record(
    text=TEXT,
    output_ids=listed(WHOLE),
    meta_info=record(
        id=TEXT,
        finish_reason=maybe(record(type=TEXT)),
        prompt_tokens=WHOLE,
        completion_tokens=WHOLE,
        cached_tokens=WHOLE,
    ),
)
_OLLAMA_END: Mapping[str, Schema] = {
    "model": TEXT,
    "created_at": TEXT,
    "done": YES_NO,
    "done_reason": TEXT,
}
_OLLAMA_MODEL = record(name=TEXT, model=TEXT, size=WHOLE, digest=TEXT, details=ANY_OBJECT)

_RESPONSE = record(
    id=TEXT,
    object=one_of("response"),
    created_at=WHOLE,
    status=one_of("queued", "in_progress", "completed", "incomplete", "failed", "cancelled"),
    model=TEXT,
    output=listed(record(id=TEXT, type=one_of("message", "reasoning", "function_call"), status=TEXT)),
    error=maybe(ANY_OBJECT),
    usage=maybe(record(input_tokens=WHOLE, output_tokens=WHOLE, total_tokens=WHOLE)),
)

ANSWERS: Mapping[str, Schema] = {
    "/v1/chat/completions": record(
        id=TEXT,
        object=one_of("chat.completion"),
        created=WHOLE,
        model=TEXT,
        choices=listed(record(index=WHOLE, message=_CHAT_MESSAGE, finish_reason=TEXT, logprobs=maybe(ANY_OBJECT))),
        usage=_USAGE,
    ),
    "/v1/completions": record(
        id=TEXT,
        object=one_of("text_completion"),
        created=WHOLE,
        model=TEXT,
        choices=listed(record(index=WHOLE, text=TEXT, finish_reason=TEXT, logprobs=maybe(ANY_OBJECT))),
        usage=_USAGE,
    ),
    "/v1/responses": _RESPONSE,
    "GET /v1/responses/{response_id}": _RESPONSE,
    "DELETE /v1/responses/{response_id}": record(id=TEXT, deleted=YES_NO),
    "/v1/responses/{response_id}/cancel": _RESPONSE,
    "/v1/responses/{response_id}/input_items": record(
        object=one_of("list"), data=listed(record(id=TEXT, type=TEXT)), has_more=YES_NO
    ),
    "/v1/embeddings": record(
        object=one_of("list"),
        data=listed(
            record(object=one_of("embedding"), index=WHOLE, embedding={"anyOf": [TEXT, listed(NUMBER)]}),
        ),
        model=TEXT,
        usage=record(prompt_tokens=WHOLE, total_tokens=WHOLE),
    ),
    "/api/embed": record(model=TEXT, embeddings=listed(listed(NUMBER)), prompt_eval_count=WHOLE),
    "/v1/score": record(object=one_of("scoring"), model=TEXT, scores=listed(listed(NUMBER)), usage=_USAGE),
    "/v1/loads": record(
        loads=listed(record(worker=WHOLE, num_running_reqs=WHOLE, num_waiting_reqs=WHOLE, token_usage=NUMBER)),
        open_requests=WHOLE,
    ),
    "/freeze_gc": _SUCCESS,
    "/start_profile": _SUCCESS,
    "/stop_profile": _SUCCESS,
    "/configure_logging": _SUCCESS,
    "/v1/models": record(object=one_of("list"), data=listed(_MODEL)),
    "/v1/models/{model}": _MODEL,
    "/v1/messages": record(
        id=TEXT,
        type=one_of("message"),
        role=one_of("assistant"),
        model=TEXT,
        content=listed(record(type=one_of("text", "thinking", "tool_use"))),
        stop_reason=one_of("end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"),
        stop_sequence=maybe(TEXT),
        usage=record(input_tokens=WHOLE, output_tokens=WHOLE),
    ),
    "/v1/messages/count_tokens": record(input_tokens=WHOLE),
    "/api/chat": record(**_OLLAMA_END, message=record(role=one_of("assistant"), content=TEXT)),
    "/api/generate": record(**_OLLAMA_END, response=TEXT),
    "/api/tags": record(models=listed(_OLLAMA_MODEL)),
    "/api/ps": record(models=listed(_OLLAMA_MODEL)),
    "/api/show": record(
        template=TEXT, parameters=TEXT, details=ANY_OBJECT, model_info=ANY_OBJECT, capabilities=listed(TEXT)
    ),
    "/api/version": record(version=TEXT),
    "/generate": {"anyOf": [_GENERATED, listed(_GENERATED)]},
    "/tokenize": record(tokens=listed(WHOLE), count=WHOLE, max_model_len=WHOLE),
    "/detokenize": record(text=TEXT, prompt=TEXT),
    "/tokenizer_info": record(
        bos_token=maybe(TEXT), eos_token=maybe(TEXT), vocab_size=WHOLE, chat_template=maybe(TEXT)
    ),
    "/separate_reasoning": record(text=TEXT, reasoning_text=TEXT),
    "/parse_function_call": record(normal_text=TEXT, calls=listed(ANY_OBJECT)),
    "/abort_request": _SUCCESS,
    "/flush_cache": _SUCCESS,
    "/health": _STATUS,
    "/health_generate": _STATUS,
    "/ready": _STATUS,
    "/server_info": record(
        model_name=TEXT,
        version=TEXT,
        context_length=WHOLE,
        plan=ANY_OBJECT,
        config=ANY_OBJECT,
        stats=ANY_OBJECT,
        open_requests=WHOLE,
    ),
    "/model_info": record(
        model_path=TEXT,
        served_model_name=TEXT,
        is_generation=YES_NO,
        vocab_size=WHOLE,
        context_length=WHOLE,
        max_input_tokens=WHOLE,
        has_chat_template=YES_NO,
    ),
    "/page/live": record(
        model=TEXT,
        alive=YES_NO,
        open_requests=WHOLE,
        stats=maybe(record(num_running=WHOLE, num_queued=WHOLE, totals=ANY_OBJECT)),
        latencies=ANY_OBJECT,
        recent=listed(ANY_OBJECT),
    ),
    "/openapi.json": record(openapi=TEXT, info=ANY_OBJECT, paths=ANY_OBJECT),
}

ERRORS: Mapping[str, Schema] = {
    "Error": record(error=record(message=TEXT, type=TEXT, param=maybe(TEXT), code=maybe(TEXT))),
    "AnthropicError": record(type=one_of("error"), error=record(type=TEXT, message=TEXT)),
    "OllamaError": record(error=TEXT),
}
