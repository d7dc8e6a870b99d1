"""Lets one of several requests with the same uncached prefix go first, so that the others find it in the cache.

It knows neither memory nor rows.
"""

from __future__ import annotations

from cardan.cache import NodeHandle
from cardan.scheduler.request import Request
from cardan.types import Int32Array

SHARED_TOKENS = 32
"""Least length of a shared uncached prefix that is worth waiting for."""

LEAST_PATIENCE = 8
"""Passes that a request waits at least before it goes on regardless."""


class SharedPrefixes:
    """The uncached prefixes that are being computed in one pass.

    Two requests share the next tokens exactly when their cached prefixes end in the same place and the same tokens
    follow, so one look-up per request finds out. One that has waited already waits for the rest as well, however short.
    """

    __slots__ = ("_half_done", "_half_done_window", "_page", "_seen", "_window")

    def __init__(self, page_size: int) -> None:
        self._page = page_size
        self._window = -(-SHARED_TOKENS // page_size) * page_size
        self._half_done: tuple[str | None, int, bytes] | None = None
        self._half_done_window = self._window
        self._seen: set[tuple[str | None, int, bytes]] = set()

    def note(self, request: Request, node: NodeHandle, cached: int) -> None:
        """A request's tokens from ``cached`` on are being computed; its cached prefix ends in ``node``."""
        for window in (self._window, self._page):
            if (key := self._key(request, node, cached, window)) is not None:
                self._seen.add(key)

    def note_half_done(self, request: Request, cached: int) -> None:
        """The half-prefilled request goes on from ``cached``; what it has computed so far counts as shared as well."""
        self.note(request, request.node, cached)
        self._half_done_window = max(self._window - (cached - request.prefill_start), self._page)
        self._half_done = self._key(request, request.node, cached, self._half_done_window)

    def defers(self, request: Request, node: NodeHandle, cached: int, chunk_size: int) -> bool:
        """Whether a request should wait a pass; it does so no longer than its own prompt would take twice over."""
        key = self._key(request, node, cached, self._page if request.deferrals else self._window)
        joins = self._half_done is not None and self._half_done == self._key(
            request, node, cached, self._half_done_window
        )
        if not joins and (key is None or key not in self._seen):
            return False
        patience = LEAST_PATIENCE
        if chunk_size > 0:
            patience += 2 * (request.num_prompt // chunk_size)
        if request.deferrals >= patience:
            return False
        request.deferrals += 1
        return True

    def _key(
        self, request: Request, node: NodeHandle, cached: int, window: int
    ) -> tuple[str | None, int, bytes] | None:
        limit = request.match_limit() // self._page * self._page
        if limit - cached < window:
            return None
        ahead: Int32Array = request.sequence()[cached : cached + window]
        return request.cache_salt, id(node), ahead.tobytes()
