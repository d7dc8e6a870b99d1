"""The sockets between the processes: one inbox per process, named by a file in a private folder.

It knows no message. Inboxes are bound and senders connect, so that sending never waits for the other side.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq

SCHEDULER_INBOX = "scheduler"
DETOKENIZER_INBOX = "detokenizer"
FRONTEND_INBOX = "frontend"

_RECONNECT_MS = 5
"""A sender that starts before its inbox tries again this soon."""


def address(folder: Path, inbox: str) -> str:
    """ZeroMQ address of an inbox."""
    return f"ipc://{folder / inbox}"


def open_inbox(context: zmq.Context[Any], folder: Path, inbox: str) -> zmq.Socket[bytes]:
    """Bind an inbox. Its queue is not limited: what is sent is never dropped and never blocks the sender."""
    socket: zmq.Socket[bytes] = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(address(folder, inbox))
    return socket


class Outbox:
    """Sends to an inbox of another process."""

    def __init__(self, context: zmq.Context[Any], folder: Path, inbox: str) -> None:
        socket: zmq.Socket[bytes] = zmq.Socket(context, zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.connect(address(folder, inbox))
        self._socket = socket

    def send(self, payload: bytes) -> None:
        """Hand a message over; returns at once."""
        self._socket.send(payload, zmq.NOBLOCK, copy=len(payload) < 65536)

    def close(self, linger_ms: int = 0) -> None:
        """Close, after waiting at most ``linger_ms`` for what was sent to leave this process."""
        self._socket.close(linger=linger_ms)
