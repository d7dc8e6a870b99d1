"""Connections that end when their client does nothing: sockets are few, and an idle one holds one for ever.

It knows no request. The limits of the operating system on open files are raised here too, since connections are files.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import struct
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger("cardan.server")


def raise_file_limit() -> int:
    """Let this process open as many files as the system allows it. Returns how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft >= hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS has a lower limit of its own
        logger.debug("the limit of %d open files stays: %s", soft, error)
        return soft
    return hard


class GuardedProtocol(H11Protocol):
    """One connection; it is closed when its client was waited for ``client_timeout_s`` long.

    A client is waited for from the start of a connection until its first request is complete, while it sends a request,
    and while it does not read what it is sent. Between two requests uvicorn's own limit holds.
    """

    client_timeout_s = 60.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait."""
        super().connection_made(transport)
        self._wait_again()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._wait_no_more()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Wait for the rest of a request, where it is not complete."""
        super().data_received(data)
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._wait_again()
        elif not self.flow.write_paused:
            self._wait_no_more()

    def pause_writing(self) -> None:
        """Wait for the client to read."""
        super().pause_writing()
        self._wait_again()

    def resume_writing(self) -> None:
        """It has read."""
        self._wait_no_more()
        super().resume_writing()

    def _wait_again(self) -> None:
        self._wait_no_more()
        self._waiting = self.loop.call_later(self.client_timeout_s, self._give_up)

    def _wait_no_more(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _give_up(self) -> None:
        client = ":".join(map(str, self.client or ("an unknown client",)))
        logger.info("closing the connection of %s, which was waited for %g s", client, self.client_timeout_s)
        # Without lingering the system drops what was not sent, rather than keep it for a reader that may never come.
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


def guarded_protocol(client_timeout_s: float) -> type[GuardedProtocol]:
    """The protocol with a limit of its own; uvicorn makes the instances."""
    return type("GuardedProtocol", (GuardedProtocol,), {"client_timeout_s": client_timeout_s})
