"""What is served, and the cache, open requests and tokenizer by hand.

It knows no generation.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cardan.errors import RequestError, UnknownModelError
from cardan.server.chats.preparation import answer_format
from cardan.server.http.bodies import Body, parse_body, read_object, shorten
from cardan.server.http.replies import JsonResponse
from cardan.server.prompts import check_prompt_ids, encode_prompt
from cardan.server.settings_report import shown_settings
from cardan.server.state import ServerState, state_of


async def server_info(request: Request) -> Response:
    """GET ``/server_info``: model, plan, settings (never the keys) and the engine's gauges."""
    state = state_of(request)
    info = dataclasses.asdict(state.engine.info)
    stats = dataclasses.asdict(await state.engine.stats())
    answers = answer_format(state)
    parsers = {"tool_call_parser": answers.tool_parser, "reasoning_parser": answers.reasoning_parser}
    return JsonResponse(
        {
            **info,
            "config": shown_settings(state.config),
            "answers": parsers,
            "stats": stats,
            "open_requests": state.num_open,
        }
    )


async def model_info(request: Request) -> Response:
    """GET ``/get_model_info`` and ``/model_info``."""
    info = state_of(request).engine.info
    return JsonResponse(
        {
            "model_path": info.model_path,
            "served_model_name": info.model_name,
            "is_generation": not state_of(request).config.model.is_embedding,
            "vocab_size": info.vocab_size,
            "context_length": info.context_length,
            "max_input_tokens": info.max_input_tokens,
            "has_chat_template": state_of(request).engine.tokenizer.has_chat_template,
        }
    )


async def tokenizer_info(request: Request) -> Response:
    """GET ``/tokenizer_info``: what else a client needs that tokenizes by ``/tokenize``."""
    tokenizer = state_of(request).engine.tokenizer
    named = {"bos_token": None, "eos_token": None, **tokenizer.special_tokens}
    template = tokenizer.chat_templates.get("default")
    return JsonResponse({**named, "vocab_size": tokenizer.vocab_size, "chat_template": template})


async def list_models(request: Request) -> Response:
    """GET ``/v1/models``."""
    return JsonResponse({"object": "list", "data": [_model_object(state_of(request))]})


async def get_model(request: Request) -> Response:
    """GET ``/v1/models/{id}``."""
    state, name = state_of(request), request.path_params["model"]
    if name != state.model_name:
        raise UnknownModelError(
            f"The model '{shorten(name)}' does not exist here; this server serves '{state.model_name}'.",
            param="model",
            code="model_not_found",
        )
    return JsonResponse(_model_object(state))


def _model_object(state: ServerState) -> dict[str, Any]:
    info = state.engine.info
    return {
        "id": info.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "cardan",
        "root": info.model_name,
        "max_model_len": info.context_length,
    }


async def flush_cache(request: Request) -> Response:
    """POST or GET ``/flush_cache``; refused while requests run."""
    if await state_of(request).engine.flush_cache():
        return JsonResponse({"success": True, "message": "The prefix cache is empty."})
    raise RequestError(
        "The cache was not flushed, since requests are running or waiting. Try again when the server is idle.",
        code="busy",
    )


class AbortBody(Body):
    """Body of ``/abort_request``."""

    rid: str | None = None
    abort_all: bool = False


async def abort_request(request: Request) -> Response:
    """POST ``/abort_request`` with ``rid`` or ``abort_all``; an id that is not open is no error."""
    state = state_of(request)
    body = parse_body(AbortBody, await read_object(request, state.config.server.max_body_bytes))
    if bool(body.rid) == body.abort_all:
        raise RequestError("Send either 'rid' or \"abort_all\": true.", param="rid")
    await state.abort(body.rid or None)
    return JsonResponse({"success": True})


class TokenizeBody(Body):
    """Body of ``/tokenize``; ``text`` and ``prompt`` mean the same."""

    model: str | None = None
    text: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True


async def tokenize(request: Request) -> Response:
    """POST ``/tokenize``."""
    state = state_of(request)
    body = parse_body(TokenizeBody, await read_object(request, state.config.server.max_body_bytes))
    state.check_model(body.model)
    if (body.text is None) == (body.prompt is None):
        raise RequestError("Send exactly one of 'text' and 'prompt'.", param="text")
    text = (body.text if body.text is not None else body.prompt) or ""
    ids = await encode_prompt(state.engine.tokenizer, text, add_special_tokens=body.add_special_tokens)
    return JsonResponse({"tokens": ids, "count": len(ids), "max_model_len": state.engine.info.context_length})


class DetokenizeBody(Body):
    """Body of ``/detokenize``."""

    model: str | None = None
    tokens: list[Any]
    skip_special_tokens: bool = True


async def detokenize(request: Request) -> Response:
    """POST ``/detokenize``; clients look for the answer under either name."""
    state = state_of(request)
    body = parse_body(DetokenizeBody, await read_object(request, state.config.server.max_body_bytes))
    state.check_model(body.model)
    ids = check_prompt_ids(body.tokens, state.engine.info.vocab_size, "tokens")
    decode = state.engine.tokenizer.decode
    text = await asyncio.to_thread(decode, ids, skip_special_tokens=body.skip_special_tokens)
    return JsonResponse({"text": text, "prompt": text})
