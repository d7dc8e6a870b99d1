"""Every route in one table: path, methods, what answers it, and what it takes.

The application serves this table, the OpenAPI document and docs/http-api.md describe it. It knows no socket.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from cardan.server.anthropic import messages as anthropic
from cardan.server.anthropic.bodies import CountBody, MessagesBody
from cardan.server.http.replies import JsonResponse
from cardan.server.http.served_route import EVENTS, ServedRoute, served_get, served_post
from cardan.server.native import admin, health, parsing, tuning
from cardan.server.native.generate import GenerateBody, generate
from cardan.server.ollama import bodies as ollama_bodies
from cardan.server.ollama import models as ollama_models
from cardan.server.ollama import routes as ollama
from cardan.server.openai import embeddings, scoring
from cardan.server.openai.bodies import ChatBody, CompletionBody
from cardan.server.openai.chat import chat_completions
from cardan.server.openai.completions import completions
from cardan.server.openai.responses import routes as responses
from cardan.server.openai.responses.bodies import ResponsesBody
from cardan.server.openapi import build_document, build_page
from cardan.server.page import routes as page
from cardan.server.state import state_of

OPENAI = (
    served_post(
        "/v1/chat/completions",
        endpoint=chat_completions,
        body=ChatBody,
        stream=EVENTS,
        summary="OpenAI's chat completions, streamed or whole",
    ),
    served_post(
        "/v1/completions",
        endpoint=completions,
        body=CompletionBody,
        stream=EVENTS,
        summary="OpenAI's completions; a prompt is text or token ids",
    ),
    served_post(
        "/v1/responses",
        endpoint=responses.create,
        body=ResponsesBody,
        stream=EVENTS,
        summary="OpenAI's responses, streamed, whole, or in the background",
    ),
    ServedRoute(
        paths=("/v1/responses/{response_id}",),
        methods=("GET",),
        endpoint=responses.retrieve,
        query=responses.GET_QUERY,
        summary="a stored response",
    ),
    ServedRoute(
        paths=("/v1/responses/{response_id}",),
        methods=("DELETE",),
        endpoint=responses.delete,
        summary="forget a stored response",
    ),
    ServedRoute(
        paths=("/v1/responses/{response_id}/cancel",),
        methods=("POST",),
        endpoint=responses.cancel,
        summary="end a response that runs in the background",
    ),
    ServedRoute(
        paths=("/v1/responses/{response_id}/input_items",),
        methods=("GET",),
        endpoint=responses.input_items,
        query=responses.LIST_QUERY,
        summary="what a stored response was asked",
    ),
    served_post(
        "/v1/embeddings",
        endpoint=embeddings.embeddings,
        body=embeddings.EmbeddingsBody,
        summary="texts as vectors, with `--is-embedding`",
    ),
    served_post(
        "/v1/score",
        endpoint=scoring.score,
        body=scoring.ScoreBody,
        summary="how likely certain tokens are to follow a query and each of some items",
    ),
    served_get("/v1/models", endpoint=admin.list_models, summary="the model that is served"),
    served_get("/v1/models/{model:path}", endpoint=admin.get_model, summary="the same by name"),
)

ANTHROPIC = (
    ServedRoute(
        paths=("/v1/messages",),
        methods=("POST",),
        endpoint=anthropic.messages,
        body=MessagesBody,
        query=anthropic.QUERY,
        stream=EVENTS,
        summary="Anthropic's messages, streamed or whole",
    ),
    ServedRoute(
        paths=("/v1/messages/count_tokens",),
        methods=("POST",),
        endpoint=anthropic.count_tokens,
        body=CountBody,
        query=anthropic.QUERY,
        summary="how many tokens a conversation has as a prompt",
    ),
)

OLLAMA = (
    served_post(
        "/api/chat",
        endpoint=ollama.chat,
        body=ollama_bodies.ChatBody,
        stream=ollama.NDJSON,
        summary="Ollama's chat, streamed line by line or whole",
    ),
    served_post(
        "/api/generate",
        endpoint=ollama.generate,
        body=ollama_bodies.GenerateBody,
        stream=ollama.NDJSON,
        summary="Ollama's completions, with the model's chat template, one of `{{ .Prompt }}`, or `raw`",
    ),
    served_post(
        "/api/embed",
        endpoint=embeddings.ollama_embed,
        body=embeddings.EmbedBody,
        summary="texts as vectors, as Ollama has it",
    ),
    served_get("/api/tags", endpoint=ollama_models.tags, summary="the model that is served, as Ollama lists it"),
    served_get("/api/ps", endpoint=ollama_models.running, summary="the same, as loaded"),
    served_post(
        "/api/show",
        endpoint=ollama_models.show,
        body=ollama_bodies.ShowBody,
        summary="template, capabilities and facts of the model",
    ),
    served_get("/api/version", endpoint=ollama_models.version, summary="Cardan's version"),
)

NATIVE = (
    served_post(
        "/generate",
        endpoint=generate,
        body=GenerateBody,
        stream=EVENTS,
        summary="the native endpoint: `text` or `input_ids`, `sampling_params`, logprobs, batches, streams",
    ),
    served_post(
        "/tokenize", "/v1/tokenize", endpoint=admin.tokenize, body=admin.TokenizeBody, summary="text to token ids"
    ),
    served_post(
        "/detokenize",
        "/v1/detokenize",
        endpoint=admin.detokenize,
        body=admin.DetokenizeBody,
        summary="token ids to text",
    ),
    served_get(
        "/tokenizer_info",
        endpoint=admin.tokenizer_info,
        summary="where texts begin and end, and the chat template, for clients that tokenize by the routes above",
    ),
    served_post(
        "/separate_reasoning",
        endpoint=parsing.separate_reasoning,
        body=parsing.SeparateBody,
        summary="the reasoning in a text, and the rest of it",
    ),
    served_post(
        "/parse_function_call",
        endpoint=parsing.parse_function_call,
        body=parsing.ParseCallBody,
        summary="the calls of tools in a text, and the rest of it",
    ),
    served_post(
        "/abort_request",
        endpoint=admin.abort_request,
        body=admin.AbortBody,
        summary="end one request by `rid`, or all",
    ),
    ServedRoute(
        paths=("/flush_cache",),
        methods=("POST", "GET"),
        endpoint=admin.flush_cache,
        summary="empty the prefix cache when nothing runs",
    ),
)


async def openapi_document(request: Request) -> Response:
    """GET ``/openapi.json``."""
    _, document = _described(request)
    return JsonResponse(document)


async def docs_page(request: Request) -> Response:
    """GET ``/docs``."""
    return HTMLResponse(build_page(*_described(request)))


def _described(request: Request) -> tuple[dict[str, tuple[ServedRoute, ...]], dict[str, Any]]:
    state = state_of(request)
    groups = served_groups(with_metrics=state.config.server.enable_metrics)
    return groups, build_document(groups, state.engine.info.version)


OPERATION = (
    served_get("/docs", endpoint=docs_page, summary="all routes with their fields, for people", media_type="text/html"),
    served_get("/openapi.json", endpoint=openapi_document, summary="the same as an OpenAPI document"),
    served_get("/health", endpoint=health.health, summary="whether the process and the engine live; generates nothing"),
    served_get(
        "/health_generate",
        endpoint=health.health_generate,
        summary="generates one token; a busy engine that makes progress is healthy",
    ),
    served_get("/v1/loads", endpoint=tuning.loads, summary="what the engine has to do, for routers"),
    ServedRoute(
        paths=("/freeze_gc",),
        methods=("POST",),
        endpoint=tuning.freeze_gc,
        summary="have the server's garbage collector pass over what lives by now",
    ),
    served_post(
        "/configure_logging",
        endpoint=tuning.configure_logging,
        body=tuning.LoggingBody,
        summary="change what the server's process logs",
    ),
    served_post(
        "/start_profile",
        endpoint=tuning.start_profile,
        body=tuning.ProfileBody,
        body_optional=True,
        summary="record what the scheduler's steps do, with `--profile-folder`",
    ),
    ServedRoute(
        paths=("/stop_profile",),
        methods=("POST",),
        endpoint=tuning.stop_profile,
        summary="end the recording and write it, as a Chrome trace",
    ),
    served_get("/ready", endpoint=health.ready, summary="whether new requests are taken"),
    served_get(
        "/server_info",
        "/get_server_info",
        endpoint=admin.server_info,
        summary="model, the plan with sources and reasons, settings, gauges",
    ),
    served_get(
        "/model_info",
        "/get_model_info",
        endpoint=admin.model_info,
        summary="path, vocabulary and context of the model",
    ),
    served_get(
        "/metrics",
        endpoint=health.metrics,
        summary="Prometheus; off with `--no-enable-metrics`",
        media_type="text/plain",
    ),
)

PAGE = (
    served_get(
        "/",
        endpoint=page.root,
        summary="a page with a chat and a live view of the engine, for browsers; for others a word that Ollama's "
        "clients look for",
        media_type="text/html",
        other_media_type="text/plain",
    ),
    *(
        served_get(path, endpoint=page.part, summary="a part of the page", media_type=media_type)
        for path, (_, media_type) in page.FILES.items()
    ),
    served_get(
        "/page/live", endpoint=page.live, summary="what the page's live view shows: gauges, latencies, last requests"
    ),
)

GROUPS = {
    "OpenAI": OPENAI,
    "Anthropic": ANTHROPIC,
    "Ollama": OLLAMA,
    "Native": NATIVE,
    "Operation": OPERATION,
    "Page": PAGE,
}
"""All routes, under the headings that pages about them have."""


def served_groups(*, with_metrics: bool) -> dict[str, tuple[ServedRoute, ...]]:
    """The routes of a server, with or without ``/metrics``."""
    return {
        group: tuple(route for route in routes if with_metrics or route.endpoint is not health.metrics)
        for group, routes in GROUPS.items()
    }


def build_routes(*, with_metrics: bool) -> Iterator[Route]:
    """Routes of the application."""
    for routes in served_groups(with_metrics=with_metrics).values():
        for route in routes:
            yield from route.build()
