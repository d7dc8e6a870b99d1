"""Server-sent events: early errors become an HTTP status, later ones an event; a client that leaves ends the work.

It does not know what the events hold.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cardan.server.generation import answer, until_disconnect
from cardan.server.replies import describe_error

DONE = b"data: [DONE]\n\n"

Events = AsyncGenerator[Any, None]
"""JSON values, one an event."""


def encode_event(value: object) -> bytes:
    """One event that holds a JSON value."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def _encode_all(events: Events) -> AsyncGenerator[bytes, None]:
    started = False
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                started = True
                yield encode_event(event)
    except Exception as error:
        if not started:
            raise
        yield encode_event(describe_error(error).body())
    yield DONE


class EventStream(Response):
    """A stream whose first event is known already."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; the generator is closed however this ends."""
        async with contextlib.aclosing(self._rest):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            with contextlib.suppress(ClientDisconnect):
                await until_disconnect(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for event in self._rest:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def open_stream(request: Request, events: Events) -> EventStream:
    """Wait for the first event and answer with the stream.

    Raises:
        Whatever the events raise before the first one, so that it becomes the HTTP status.
    """
    encoded = _encode_all(events)
    first = await answer(request, _first_of(encoded))
    return EventStream(first, encoded)


async def _first_of(encoded: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(encoded)
