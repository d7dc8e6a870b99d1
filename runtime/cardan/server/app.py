"""Puts the routes together into one ASGI application.

It starts nothing: an engine is given, and whoever runs the application decides on sockets and signals.
"""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cardan.config import EngineConfig
from cardan.engine.api import AsyncEngine
from cardan.errors import CardanError
from cardan.server import health
from cardan.server.auth import ApiKeyGuard
from cardan.server.bodies import shorten
from cardan.server.metrics import ServerMetrics
from cardan.server.replies import answer_error
from cardan.server.routes import build_routes
from cardan.server.state import ServerState


def create_app(engine: AsyncEngine, config: EngineConfig) -> Starlette:
    """The application in front of a running engine."""
    server = config.server
    middleware = [Middleware(ApiKeyGuard, api_key=server.api_key)] if server.api_key is not None else []
    handlers: dict[Any, Any] = {
        HTTPException: _answer_http_error,
        CardanError: answer_error,
        ClientDisconnect: _answer_nobody,
        Exception: answer_error,
    }
    app = Starlette(
        routes=list(build_routes(with_metrics=server.enable_metrics)),
        middleware=middleware,
        exception_handlers=handlers,
    )
    app.router.redirect_slashes = False
    app.state.server = ServerState(engine, config, ServerMetrics())
    app.state.probe_timeout_s = health.PROBE_TIMEOUT_S
    app.state.metrics_wait_s = health.METRICS_WAIT_S
    return app


async def _answer_http_error(request: Request, error: HTTPException) -> Response:
    path = shorten(request.url.path)
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
