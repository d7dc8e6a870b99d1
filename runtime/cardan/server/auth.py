"""Checks the API key of each request, in constant time; health routes stay open. The key is never logged.

It does not know where the key came from.
"""

from __future__ import annotations

import hmac

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from cardan.server.replies import describe_error

OPEN_PATHS = frozenset({"/health", "/health_generate", "/ready"})
"""Routes that a load balancer may ask without a key."""


class ApiKeyGuard:
    """ASGI middleware: without the right bearer token a request gets a 401."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._allows(scope):
            await self._app(scope, receive, send)
            return
        error = HTTPException(
            401,
            "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY'.",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await describe_error(error).response(scope["path"])(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, token = value.partition(b" ")
                return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._expected)
            if name == b"x-api-key":
                return hmac.compare_digest(value.strip(), self._expected)
        return False
