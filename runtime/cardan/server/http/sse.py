"""Streamed answers: early errors become an HTTP status, later ones the last item; a client that leaves ends the work.

It does not know what the items hold; how each API writes them down is a ``StreamForm``.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cardan.server.http.disconnects import until_disconnect, while_connected
from cardan.server.http.replies import ErrorReply, describe_error

DONE = b"data: [DONE]\n\n"

Events = AsyncGenerator[Any, None]
"""JSON values, one an event."""


def encode_event(value: object) -> bytes:
    """One event that holds a JSON value."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def encode_typed_event(value: Mapping[str, Any]) -> bytes:
    """One event that holds an object and is named by its ``type``."""
    return b"event: " + str(value["type"]).encode() + b"\n" + encode_event(value)


def _encode_error(reply: ErrorReply) -> bytes:
    return encode_event(reply.body())


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamForm:
    """How an API writes a stream.

    Attributes:
        media_type: of the response.
        encode: one item.
        encode_error: the last item, where the work failed.
        end: what follows the last item.
    """

    media_type: str = "text/event-stream"
    encode: Callable[[Any], bytes] = encode_event
    encode_error: Callable[[ErrorReply], bytes] = _encode_error
    end: bytes = DONE


OPENAI_FORM = StreamForm()
"""Events without names, and ``[DONE]`` behind the last."""


async def _encode_all(events: Events, form: StreamForm) -> AsyncGenerator[bytes, None]:
    started = False
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                started = True
                yield form.encode(event)
    except Exception as error:
        if not started:
            raise
        yield form.encode_error(describe_error(error))
    if form.end:
        yield form.end


class EventStream(Response):
    """A stream whose first item is known already."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], form: StreamForm = OPENAI_FORM) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=form.media_type)
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the items; the generator is closed however this ends."""
        async with contextlib.aclosing(self._rest):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            with contextlib.suppress(ClientDisconnect):
                await until_disconnect(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for event in self._rest:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def open_stream(request: Request, events: Events, form: StreamForm = OPENAI_FORM) -> EventStream:
    """Wait for the first item and answer with the stream.

    Raises:
        Whatever the events raise before the first one, so that it becomes the HTTP status.
    """
    encoded = _encode_all(events, form)
    first = await while_connected(request, _first_of(encoded))
    return EventStream(first, encoded, form)


async def _first_of(encoded: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(encoded)
