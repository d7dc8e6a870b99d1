"""Turns errors into HTTP: status, headers, and a body in the form of the API that was asked.

It knows no route. Messages of unexpected errors stay in the log.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cardan.errors import (
    CardanError,
    EngineBusyError,
    EngineDeadError,
    PromptTooLongError,
    QueueFullError,
    RequestAbortedError,
    RequestError,
    RequestTimeoutError,
    UnknownModelError,
    UnsupportedError,
)
from cardan.server.http.error_forms import ToldError, form_of, status_of

MAX_MESSAGE = 2000
"""Longest error message, in characters: a wrong value that it repeats may be huge."""

logger = logging.getLogger("cardan.server")


class JsonResponse(Response):
    """A JSON body, encoded by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode the content."""
        return msgspec.json.encode(content)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply:
    """How an error is told.

    Attributes:
        status: HTTP status.
        message: for people.
        kind: OpenAI's ``type``.
        param: the field at fault.
        code: a short word for programs.
        headers: further headers.
    """

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self, path: str = "") -> dict[str, Any]:
        """The error as the API of a path writes it: OpenAI's object where that has none of its own."""
        message = self.message if len(self.message) <= MAX_MESSAGE else self.message[:MAX_MESSAGE] + "…"
        told = ToldError(status=self.status, message=message, kind=self.kind, param=self.param, code=self.code)
        return form_of(path)(told)

    def response(self, path: str = "") -> JsonResponse:
        """The whole response to a request of a path."""
        status = status_of(path, self.status, self.kind)
        return JsonResponse(self.body(path), status_code=status, headers=dict(self.headers))


def describe_error(error: Exception) -> ErrorReply:
    """How to tell an error; unexpected ones are logged with their traceback and told without details."""
    if isinstance(error, RequestError):
        return _describe_request_error(error)
    if isinstance(error, HTTPException):
        return ErrorReply(
            status=error.status_code,
            message=error.detail,
            kind="invalid_request_error" if error.status_code < 500 else "server_error",
            code=_HTTP_CODES.get(error.status_code),
            headers=error.headers or {},
        )
    if isinstance(error, CardanError):
        return _describe_engine_error(error)
    logger.error("An unexpected error while answering a request", exc_info=error)
    return ErrorReply(
        status=500,
        message="An internal error; the server's log has the details.",
        kind="server_error",
        code="internal_error",
    )


_HTTP_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_encoding",
    503: "unavailable",
}


def _describe_request_error(error: RequestError) -> ErrorReply:
    status, code = 400, error.code
    if isinstance(error, UnknownModelError):
        status, code = 404, code or "model_not_found"
    elif isinstance(error, PromptTooLongError):
        code = code or "context_length_exceeded"
    return ErrorReply(status=status, message=str(error), param=error.param, code=code)


def _describe_engine_error(error: CardanError) -> ErrorReply:
    message = str(error)
    if isinstance(error, QueueFullError | EngineBusyError):
        wait = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        code = "queue_full" if isinstance(error, QueueFullError) else "engine_busy"
        return ErrorReply(status=503, message=message, kind="overloaded_error", code=code, headers=wait)
    if isinstance(error, EngineDeadError):
        return ErrorReply(status=503, message=message, kind="server_error", code="engine_dead")
    if isinstance(error, RequestTimeoutError):
        return ErrorReply(status=504, message=message, kind="server_error", code="timeout")
    if isinstance(error, RequestAbortedError):
        return ErrorReply(status=503, message=message, kind="server_error", code="aborted")
    if isinstance(error, UnsupportedError):
        return ErrorReply(status=400, message=message, code="unsupported")
    return ErrorReply(status=500, message=message, kind="server_error", code="generation_failed")


async def answer_error(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for everything."""
    # The path as it was routed; that of ``request.url`` depends on what the client calls the host.
    return describe_error(error).response(request.scope["path"])
