"""One request's way through its grammar: thinking before it, tokens that it forces, the mask of the next.

It knows no scheduler; that one sees it as its ``Grammar``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

from cardan.grammar.backend import MaskRow, Matcher

MAX_FORCED = 512
"""Most tokens that are looked ahead; what follows them is found when they are through."""
MAX_STEP_S = 1.0
"""Longest time of a processor that one token of one request may take; all other requests wait meanwhile."""


_NOT_APPLIED = "the mask that forbids it was not applied"


class FreeMask:
    """The mask before a grammar begins: every token of the vocabulary but the ends."""

    def __init__(self, size: int, eos_ids: Collection[int], words: int) -> None:
        """Make the mask of ``words`` words for ids below ``size``."""
        bits = np.zeros(words * 32, dtype=np.uint8)
        bits[:size] = 1
        bits[[token for token in eos_ids if token < size]] = 0
        self.row: MaskRow = np.packbits(bits, bitorder="little").view(np.uint32)


class GrammarSession:
    """Follows one output. Forced tokens are kept to from when they are found, sampled or not.

    So a request gets the same tokens whether the scheduler jumps over them or samples them one by one.
    """

    def __init__(
        self,
        matcher: Matcher,
        free: FreeMask,
        starts_after: Sequence[int] = (),
        never_forced: Collection[int] = (),
    ) -> None:
        """Start before the first token.

        Args:
            matcher: a fresh one.
            free: the mask before the grammar begins.
            starts_after: tokens after which it begins.
            never_forced: tokens that end the request or have a bias, which are left to sampling.
        """
        self._matcher = matcher
        self._free = free
        self._starts_after = tuple(starts_after)
        self._tail: deque[int] = deque(maxlen=len(self._starts_after) or None)
        self._active = not self._starts_after
        self._never_forced = frozenset(never_forced)
        self._forced: deque[int] = deque()
        self._error: str | None = None
        self._alone = False
        if self._active:
            self._look_ahead()

    @property
    def forced(self) -> Sequence[int]:
        """Tokens that come next, whatever the model says."""
        return self._forced

    @property
    def complete(self) -> bool:
        """Whether the output matches and nothing can follow."""
        return self._active and self._error is None and self._matcher.complete

    @property
    def error(self) -> str | None:
        """Why it can go no further, or None."""
        return self._error or self._matcher.error

    @property
    def at_limit(self) -> bool:
        """Whether ``error`` is a limit that the grammar ran into; otherwise a platform did not apply a mask."""
        return self.error not in (None, _NOT_APPLIED)

    def accept(self, token: int) -> bool:
        """Take the next token. Returns False, with ``error`` set, when the grammar does not allow it."""
        if not self._active:
            self._think(token)
            return True
        if self.error is not None:
            return False
        started_s = time.thread_time()
        expected = self._forced.popleft() if self._forced else token
        if token != expected or not self._matcher.accept(token):
            self._error = self._matcher.error or _NOT_APPLIED
            return False
        if not self._forced:
            self._look_ahead()
        self._watch(started_s)
        return True

    def fill(self, row: MaskRow) -> None:
        """Write the mask of the next token; nothing is allowed once there is an error."""
        if not self._active:
            row[:] = self._free.row
        elif self._forced:
            row[:] = 0
            row[self._forced[0] // 32] = np.uint32(1 << self._forced[0] % 32)
        else:
            started_s = time.thread_time()
            self._matcher.fill(row)
            self._watch(started_s)
        self._forbid_all_after_error(row)

    @property
    def matcher(self) -> Matcher | None:
        """What makes the next mask, or None where that follows without it."""
        return self._matcher if self._active and not self._forced and not self._alone else None

    def take_filled(self, row: MaskRow, taken_s: float) -> None:
        """Another filled ``row`` by ``matcher`` among others, which took ``taken_s`` together."""
        self._alone = taken_s > MAX_STEP_S  # the next is timed by itself, to know whose is slow
        self._forbid_all_after_error(row)

    def _forbid_all_after_error(self, row: MaskRow) -> None:
        if self.error is not None:
            row[:] = 0

    def _think(self, token: int) -> None:
        self._tail.append(token)
        if tuple(self._tail) == self._starts_after:
            self._active = True
            self._look_ahead()

    def _look_ahead(self) -> None:
        for token in self._matcher.forced()[:MAX_FORCED]:
            if token in self._never_forced:
                break
            self._forced.append(token)

    def _watch(self, started_s: float) -> None:
        if time.thread_time() - started_s > MAX_STEP_S:
            self._error = f"one token of its output took longer than {MAX_STEP_S:g} s; make the grammar simpler"
