"""Every route in one table: path, methods, what answers it, and what it takes.

The application serves this table, the OpenAPI document and docs/http-api.md describe it. It knows no socket.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cardan.errors import RequestError
from cardan.server import admin, anthropic_messages, health, ollama_bodies, ollama_models, ollama_routes, parsing
from cardan.server.anthropic_bodies import CountBody, MessagesBody
from cardan.server.bodies import Body, shorten
from cardan.server.native import GenerateBody, generate
from cardan.server.openai_bodies import ChatBody, CompletionBody
from cardan.server.openai_chat import chat_completions
from cardan.server.openai_completions import completions

Endpoint = Callable[[Request], Awaitable[Response]]

EVENTS = "text/event-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRoute:
    """One route.

    Attributes:
        paths: its path, and other names of it.
        methods: HTTP methods.
        endpoint: answers.
        summary: what it does, in a few words that go on after the path.
        body: of a POST, or None.
        query: query parameters that are taken (others get a 400).
        stream: media type of the answer where the body says ``stream``.
        media_type: of the answer otherwise.
    """

    paths: tuple[str, ...]
    methods: tuple[str, ...]
    endpoint: Endpoint
    summary: str
    body: type[Body] | None = None
    query: tuple[str, ...] = ()
    stream: str | None = None
    media_type: str = "application/json"


def _get(*paths: str, endpoint: Endpoint, summary: str, media_type: str = "application/json") -> ServedRoute:
    return ServedRoute(paths=paths, methods=("GET",), endpoint=endpoint, summary=summary, media_type=media_type)


def _post(*paths: str, endpoint: Endpoint, summary: str, body: type[Body], stream: str | None = None) -> ServedRoute:
    return ServedRoute(paths=paths, methods=("POST",), endpoint=endpoint, summary=summary, body=body, stream=stream)


OPENAI = (
    _post(
        "/v1/chat/completions",
        endpoint=chat_completions,
        body=ChatBody,
        stream=EVENTS,
        summary="OpenAI's chat completions, streamed or whole",
    ),
    _post(
        "/v1/completions",
        endpoint=completions,
        body=CompletionBody,
        stream=EVENTS,
        summary="OpenAI's completions; a prompt is text or token ids",
    ),
    _get("/v1/models", endpoint=admin.list_models, summary="the model that is served"),
    _get("/v1/models/{model:path}", endpoint=admin.get_model, summary="the same by name"),
)

ANTHROPIC = (
    ServedRoute(
        paths=("/v1/messages",),
        methods=("POST",),
        endpoint=anthropic_messages.messages,
        body=MessagesBody,
        query=anthropic_messages.QUERY,
        stream=EVENTS,
        summary="Anthropic's messages, streamed or whole",
    ),
    ServedRoute(
        paths=("/v1/messages/count_tokens",),
        methods=("POST",),
        endpoint=anthropic_messages.count_tokens,
        body=CountBody,
        query=anthropic_messages.QUERY,
        summary="how many tokens a conversation has as a prompt",
    ),
)

OLLAMA = (
    _post(
        "/api/chat",
        endpoint=ollama_routes.chat,
        body=ollama_bodies.ChatBody,
        stream=ollama_routes.NDJSON,
        summary="Ollama's chat, streamed line by line or whole",
    ),
    _post(
        "/api/generate",
        endpoint=ollama_routes.generate,
        body=ollama_bodies.GenerateBody,
        stream=ollama_routes.NDJSON,
        summary="Ollama's completions, with the model's chat template, one of `{{ .Prompt }}`, or `raw`",
    ),
    _get("/api/tags", endpoint=ollama_models.tags, summary="the model that is served, as Ollama lists it"),
    _get("/api/ps", endpoint=ollama_models.running, summary="the same, as loaded"),
    _post(
        "/api/show",
        endpoint=ollama_models.show,
        body=ollama_bodies.ShowBody,
        summary="template, capabilities and facts of the model",
    ),
    _get("/api/version", endpoint=ollama_models.version, summary="Cardan's version"),
    _get("/", endpoint=ollama_models.root, summary="a word that Ollama's clients look for", media_type="text/plain"),
)

NATIVE = (
    _post(
        "/generate",
        endpoint=generate,
        body=GenerateBody,
        stream=EVENTS,
        summary="the native endpoint: `text` or `input_ids`, `sampling_params`, logprobs, batches, streams",
    ),
    _post("/tokenize", endpoint=admin.tokenize, body=admin.TokenizeBody, summary="text to token ids"),
    _post("/detokenize", endpoint=admin.detokenize, body=admin.DetokenizeBody, summary="token ids to text"),
    _post(
        "/separate_reasoning",
        endpoint=parsing.separate_reasoning,
        body=parsing.SeparateBody,
        summary="the reasoning in a text, and the rest of it",
    ),
    _post(
        "/parse_function_call",
        endpoint=parsing.parse_function_call,
        body=parsing.ParseCallBody,
        summary="the calls of tools in a text, and the rest of it",
    ),
    _post(
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

OPERATION = (
    _get("/health", endpoint=health.health, summary="whether the process and the engine live; generates nothing"),
    _get(
        "/health_generate",
        endpoint=health.health_generate,
        summary="generates one token; a busy engine that makes progress is healthy",
    ),
    _get("/ready", endpoint=health.ready, summary="whether new requests are taken"),
    _get(
        "/server_info",
        "/get_server_info",
        endpoint=admin.server_info,
        summary="model, the plan with sources and reasons, settings, gauges",
    ),
    _get(
        "/model_info",
        "/get_model_info",
        endpoint=admin.model_info,
        summary="path, vocabulary and context of the model",
    ),
    _get(
        "/metrics",
        endpoint=health.metrics,
        summary="Prometheus; off with `--no-enable-metrics`",
        media_type="text/plain",
    ),
)

GROUPS = {"OpenAI": OPENAI, "Anthropic": ANTHROPIC, "Ollama": OLLAMA, "Native": NATIVE, "Operation": OPERATION}
"""All routes, under the headings that pages about them have."""


def build_routes(*, with_metrics: bool) -> Iterator[Route]:
    """Routes of the application."""
    for routes in GROUPS.values():
        for route in routes:
            if with_metrics or route.endpoint is not health.metrics:
                yield from _build(route)


def _build(served: ServedRoute) -> Iterator[Route]:
    async def checked(request: Request) -> Response:
        for name in request.query_params:
            if name not in served.query:
                taken = f"takes only {', '.join(served.query)} as" if served.query else "takes no"
                raise RequestError(
                    f"This route {taken} query parameters, got '{shorten(name)}'.",
                    param=shorten(name),
                    code="unknown_parameter",
                )
        return await served.endpoint(request)

    for path in served.paths:
        yield Route(path, checked, methods=list(served.methods))
