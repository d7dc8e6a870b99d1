"""How each API writes an error down: OpenAI's object, Anthropic's, or Ollama's one line, chosen by the route.

It knows no exception; what went wrong was put into words before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldError:
    """An error in words.

    Attributes:
        status: HTTP status.
        message: for people.
        kind: OpenAI's ``type``.
        param: the field at fault.
        code: a short word for programs.
    """

    status: int
    message: str
    kind: str
    param: str | None = None
    code: str | None = None


ErrorForm: TypeAlias = Callable[[ToldError], dict[str, Any]]

OVERLOADED = "overloaded_error"
"""The kind of errors that pass by themselves."""

ANTHROPIC_OVERLOADED_STATUS = 529

_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


def openai_form(error: ToldError) -> dict[str, Any]:
    """``{"error": {"message", "type", "param", "code"}}``."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def anthropic_form(error: ToldError) -> dict[str, Any]:
    """``{"type": "error", "error": {"type", "message"}}``."""
    kind = _ANTHROPIC_KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    if error.kind == OVERLOADED:
        kind = OVERLOADED
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def ollama_form(error: ToldError) -> dict[str, Any]:
    """``{"error": message}``."""
    return {"error": error.message}


def form_of(path: str) -> ErrorForm:
    """The form of the API that a path belongs to; OpenAI's where it belongs to none."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return anthropic_form
    if path.startswith("/api/"):
        return ollama_form
    return openai_form


def status_of(path: str, status: int, kind: str) -> int:
    """The HTTP status: Anthropic's API has one of its own for a server with too much to do."""
    if kind == OVERLOADED and form_of(path) is anthropic_form:
        return ANTHROPIC_OVERLOADED_STATUS
    return status
