"""Reads the messages of a conversation, beside the event loop where they are many.

It knows no form of a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from cardan.errors import RequestError

T = TypeVar("T")

MANY_PIECES = 64
"""Conversations of more messages and parts are read in a thread, so that other requests go on."""

MAX_PIECES = 16384
"""Most messages and parts of messages of one conversation: more than fit into any context, and templates are slow."""


async def read_pieces(items: list[Any], param: str, read: Callable[[], T]) -> T:
    """Read a conversation; beside the event loop where it has many pieces, so that other requests go on.

    Args:
        items: its messages, as they were sent.
        param: the field that holds them, for messages.
        read: reads them.

    Raises:
        RequestError: they are too many, or one is wrong.
    """
    if _count_pieces(items, param) > MANY_PIECES:
        return await asyncio.to_thread(read)
    return read()


def _count_pieces(items: list[Any], param: str) -> int:
    """How many messages and parts of messages there are to read, parts of parts included; no further than the limit."""
    count = 0
    pending = [items]
    while pending:
        pieces = pending.pop()
        count += len(pieces)
        if count > MAX_PIECES:
            raise RequestError(
                f"'{param}' may hold at most {MAX_PIECES} messages and parts of messages, got more than {MAX_PIECES}. "
                "Send a shorter conversation.",
                param=param,
            )
        objects = [piece for piece in pieces if isinstance(piece, dict)]
        parts = [piece.get(name) for piece in objects for name in ("content", "output")]
        pending += [part for part in parts if isinstance(part, list)]
    return count
