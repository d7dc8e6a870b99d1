"""What one prefill pass may still take: tokens of the chunk, tokens of input, and memory.

It knows no order and no other pass.
"""

from __future__ import annotations

import enum
import sys

import numpy as np

from cardan.scheduler.request import Request
from cardan.scheduler.reserve import OUTPUT_CAP
from cardan.scheduler.state import State

UNLIMITED = sys.maxsize


class Verdict(enum.Enum):
    """What became of a candidate."""

    FITS = "fits"
    DEFERRED = "deferred"
    NO_ROOM = "no room"
    PASS_FULL = "pass full"


class AdmissionBudget:
    """Budgets of one prefill pass.

    Memory is what is free or evictable now, less what is reserved: for the output of running rows, and the price of
    each candidate taken so far. Locking a prefix makes less of the cache evictable, so it is asked anew each time.
    """

    def __init__(self, state: State, riding_tokens: int, riding_pages: int) -> None:
        """Open the budgets of a pass that also computes ``riding_tokens`` of rows that decode, in ``riding_pages``."""
        settings = state.settings
        self._memory = state.memory
        self._page = settings.page_size
        chunk = settings.chunked_prefill_size
        self.chunk_left = UNLIMITED if chunk == -1 else max(chunk - riding_tokens, self._page)
        self.input_left = settings.max_prefill_tokens
        self.riding_tokens = riding_pages * self._page
        self.reserved = _output_reserve(state) + self.riding_tokens
        self.is_empty = True

    @property
    def tokens_left(self) -> float:
        """Memory that a candidate may still take."""
        return self._memory.available_tokens - self.reserved

    def judge(self, request: Request, uncached: int) -> Verdict:
        """Whether a candidate fits, its matched prefix being locked."""
        if self.price(request, uncached) >= self.tokens_left:
            return Verdict.NO_ROOM
        count = self.cut(uncached)
        if count == 0 or (count > self.input_left and not self.is_empty):
            return Verdict.PASS_FULL
        return Verdict.FITS

    def price(self, request: Request, uncached: int) -> int:
        """Tokens that a whole candidate takes: its uncached prompt, the output it may still give, and a page."""
        return uncached + min(request.num_remaining, OUTPUT_CAP) + self._page

    def cut(self, num_tokens: int) -> int:
        """How many of a candidate's tokens this pass takes: all, or as many whole pages as the chunk has left."""
        if num_tokens <= self.chunk_left:
            return num_tokens
        return self.chunk_left // self._page * self._page

    def charge(self, request: Request, count: int, final: bool) -> None:
        """Take a candidate's stretch; output is reserved with the last one only."""
        self.chunk_left -= count
        self.input_left -= count
        self.reserved += self.price(request, count) if final else count + self._page
        self.is_empty = False


def _output_reserve(state: State) -> float:
    """Room kept for running rows: the share of what they may still generate, all of it with ``ignore_eos``."""
    rows = state.running.rows
    if rows.shape[0] == 0:
        return 0.0
    arrays = state.memory.arrays
    left = arrays.max_new[rows] - arrays.generated[rows] - arrays.pending[rows]
    left = np.clip(left, 0, OUTPUT_CAP)
    return float(left.sum() * state.ratio.value + left[arrays.full_reserve[rows]].sum() * (1 - state.ratio.value))
