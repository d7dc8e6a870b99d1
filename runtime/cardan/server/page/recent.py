"""The last requests and how they went, for the page; never their contents.

It knows no route.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from cardan.engine.api import GenerateOutput, GenerateRequest

MOST = 50


class RecentRequests:
    """The last choices that began, newest last."""

    def __init__(self) -> None:
        self._entries: deque[dict[str, Any]] = deque(maxlen=MOST)

    def watch(self, requests: Sequence[GenerateRequest]) -> _RecentWatcher:
        """Follow one HTTP request."""
        return _RecentWatcher(self._entries, len(requests))

    def newest_first(self) -> list[dict[str, Any]]:
        """As plain data: ``rid``, ``choice``, ``began`` (Unix time), token counts, seconds, and ``finish_reason``.

        That is None while it runs, and ``left`` where the client went away.
        """
        return [dict(entry) for entry in reversed(self._entries)]


class _RecentWatcher:
    """Follows the choices of one HTTP request."""

    def __init__(self, entries: deque[dict[str, Any]], num_prompts: int) -> None:
        self._entries = entries
        self._mine: dict[tuple[int, int], dict[str, Any]] = {}
        self._began_s = time.time()
        self._num_prompts = num_prompts

    def see(self, prompt_index: int, output: GenerateOutput) -> None:
        """Take one output."""
        key = (prompt_index, output.index)
        entry = self._mine.get(key)
        if entry is None:
            entry = self._mine[key] = {"rid": output.rid, "choice": output.index, "began": self._began_s}
            self._entries.append(entry)
        entry["prompt_tokens"] = output.prompt_tokens
        entry["cached_tokens"] = output.cached_tokens
        entry["completion_tokens"] = output.completion_tokens
        entry["queue_s"] = output.times.queue_s
        entry["first_token_s"] = output.times.first_token_s
        entry["e2e_s"] = output.times.e2e_s
        entry["finish_reason"] = output.finish_reason.kind.value if output.finish_reason else None

    def close(self) -> None:
        """Choices that have not ended never will."""
        for entry in self._mine.values():
            entry["finish_reason"] = entry["finish_reason"] or "left"
