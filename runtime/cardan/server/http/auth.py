"""Checks the keys of each request, in constant time; health routes stay open. Keys are never logged.

It does not know where the keys came from.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from cardan.server.http.replies import describe_error

OPEN_PATHS = frozenset({"/health", "/health_generate", "/ready"})
"""Routes that a load balancer may ask without a key."""

PAGE_PATHS = frozenset({"/", "/page/page.css", "/page/page.js", "/page/ask.js", "/page/live.js"})
"""Files of the page, the same on every server: a browser that opens it cannot send a key yet."""

ADMIN_PATHS = frozenset(
    {"/flush_cache", "/abort_request", "/start_profile", "/stop_profile", "/freeze_gc", "/configure_logging"}
)
"""Routes that change the server: with an admin key, they take no other."""


class KeyGuard:
    """ASGI middleware: without the right key a request gets a 401."""

    def __init__(self, app: ASGIApp, api_key: str | None = None, admin_key: str | None = None) -> None:
        """Stand before ``app``. With neither key nothing is refused."""
        self._app = app
        self._api_key = api_key.encode() if api_key is not None else None
        self._admin_key = admin_key.encode() if admin_key is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS | PAGE_PATHS or self._allows(scope):
            await self._app(scope, receive, send)
            return
        what = "admin key" if self._needs_admin(scope) else "API key"
        error = HTTPException(
            401,
            f"The {what} is missing or wrong. Send it as 'Authorization: Bearer KEY'.",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await describe_error(error).response(scope["path"])(scope, receive, send)

    def _needs_admin(self, scope: Scope) -> bool:
        return self._admin_key is not None and scope["path"] in ADMIN_PATHS

    def _allows(self, scope: Scope) -> bool:
        right = [self._admin_key] if self._needs_admin(scope) else [self._api_key, self._admin_key]
        if not self._needs_admin(scope) and self._api_key is None:
            return True
        given = list(_keys_of(scope))
        # Every pair is compared, so that the time says nothing of which one was close.
        return sum(hmac.compare_digest(key, wanted) for key in given for wanted in right if wanted is not None) > 0


def _keys_of(scope: Scope) -> Iterator[bytes]:
    """Keys that a request carries, in either of the two customary headers."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer":
                yield token.strip()
        elif name == b"x-api-key":
            yield value.strip()
