"""Responses that were stored, in memory: the newest ones, bounded in count and bytes.

It knows no engine and no HTTP.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec

MAX_RESPONSES = 1024
MAX_BYTES = 64 * 2**20


@dataclass(slots=True)
class StoredResponse:
    """One response.

    Attributes:
        response: the object as it is told.
        items: of its input, as they are listed.
        messages: the conversation up to and with the answer, without instructions.
        task: what runs it in the background, while it does.
        num_bytes: what it counts for.
    """

    response: dict[str, Any]
    items: list[dict[str, Any]]
    messages: list[dict[str, Any]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    num_bytes: int = 0

    def measure(self) -> None:
        """Count its bytes, as JSON."""
        self.num_bytes = len(msgspec.json.encode((self.response, self.items, self.messages)))


class ResponseStore:
    """Keeps responses until newer ones need the room."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        """Start empty."""
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._max_responses = max_responses
        self._max_bytes = max_bytes

    @property
    def num_bytes(self) -> int:
        """What all of them count for."""
        return sum(stored.num_bytes for stored in self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, stored: StoredResponse) -> None:
        """Keep a response, or what it has become; the oldest ones that do not run make room."""
        stored.measure()
        self._kept[stored.response["id"]] = stored
        self._kept.move_to_end(stored.response["id"])
        total = self.num_bytes
        for name in list(self._kept):
            if len(self._kept) <= self._max_responses and total <= self._max_bytes:
                break
            if self._kept[name].task is None:
                total -= self._kept.pop(name).num_bytes

    def get(self, name: str) -> StoredResponse | None:
        """A response, or None where there is none of this id (any more)."""
        return self._kept.get(name)

    def delete(self, name: str) -> StoredResponse | None:
        """Forget a response; returns it."""
        return self._kept.pop(name, None)

    def describe(self) -> str:
        """What is kept, for messages."""
        return (
            f"the newest {self._max_responses} responses, of {self._max_bytes // 2**20} MiB in all, are kept in memory"
        )
