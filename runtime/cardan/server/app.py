"""Puts the routes together into one ASGI application.

It starts nothing: an engine is given, and whoever runs the application decides on sockets and signals.
"""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cardan.config import EngineConfig, ServerConfig
from cardan.engine.api import AsyncEngine
from cardan.errors import CardanError
from cardan.server.http.auth import KeyGuard
from cardan.server.http.bodies import shorten
from cardan.server.http.replies import answer_error
from cardan.server.native import health
from cardan.server.openai.responses.store import ResponseStore
from cardan.server.routes import build_routes
from cardan.server.state import ServerState
from cardan.server.watching.metrics import AnswerCounter, ServerMetrics
from cardan.server.watching.observers import Observers
from cardan.server.watching.tracing import RequestSpans


def create_app(engine: AsyncEngine, config: EngineConfig, observers: Observers | None = None) -> Starlette:
    """The application in front of a running engine.

    Args:
        engine: what answers.
        config: as given at the start.
        observers: what looks on at requests; opened from the config where they are not given.

    Raises:
        ConfigError: observers cannot be opened.
    """
    server = config.server
    observers = observers or Observers.open(server)
    handlers: dict[Any, Any] = {
        HTTPException: _answer_http_error,
        CardanError: answer_error,
        ClientDisconnect: _answer_nobody,
        Exception: answer_error,
    }
    metrics = ServerMetrics(engine.info.model_name)
    app = Starlette(
        routes=list(build_routes(with_metrics=server.enable_metrics)),
        middleware=_middleware(server, metrics, observers),
        exception_handlers=handlers,
    )
    app.router.redirect_slashes = False
    app.state.server = ServerState(engine, config, metrics, observers.makers(server, engine))
    app.state.observers = observers
    app.state.responses = ResponseStore()
    app.state.probe_timeout_s = health.PROBE_TIMEOUT_S
    app.state.metrics_wait_s = health.METRICS_WAIT_S
    return app


def _middleware(server: ServerConfig, metrics: ServerMetrics, observers: Observers) -> list[Middleware]:
    middleware = [Middleware(AnswerCounter, metrics=metrics)]
    if observers.tracing is not None:
        middleware.append(Middleware(RequestSpans, tracing=observers.tracing))
    if server.cors_allow_origins:
        # Outside the guard: a page's browser asks for permission without a key.
        middleware.append(
            Middleware(
                CORSMiddleware, allow_origins=server.cors_allow_origins, allow_methods=["*"], allow_headers=["*"]
            )
        )
    if server.api_key is not None or server.admin_api_key is not None:
        middleware.append(Middleware(KeyGuard, api_key=server.api_key, admin_key=server.admin_api_key))
    return middleware


async def _answer_http_error(request: Request, error: HTTPException) -> Response:
    path = shorten(request.scope["path"])
    if error.status_code == 404 and error.detail == "Not Found":
        error = HTTPException(404, f"There is no route '{path}'.")
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"'{path}' does not take {request.method}; it takes {allowed}."
        error = HTTPException(405, message, headers=error.headers)
    return await answer_error(request, error)


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    # The client left; what is written here reaches no one.
    return Response(status_code=499)
