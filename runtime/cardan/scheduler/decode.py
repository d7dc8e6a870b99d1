"""Chooses the rows of a decode step, and takes rows away when the pool is full.

It does not build arrays and admits no one.
"""

from __future__ import annotations

import numpy as np

from cardan.scheduler.prefill import NO_ROWS, decodable_rows
from cardan.scheduler.request import Request
from cardan.scheduler.running import RowIndex
from cardan.scheduler.state import State, output_of
from cardan.types import FinishKind, FinishReason


class DecodePlanner:
    """Chooses decode rows for which there is room."""

    def __init__(self, state: State) -> None:
        self._state = state

    def choose(self) -> RowIndex:
        """Rows of the next decode step, room made for them; empty when there are none or a step must be read first."""
        state = self._state
        while True:
            rows = decodable_rows(state)
            if rows.shape[0] == 0:
                return NO_ROWS
            rows = self._of_one_kind(rows)
            pages = state.memory.pages_to_decode(rows)
            if state.memory.make_room(pages):
                return rows
            if self._must_read_first(pages):
                state.fall_back("pool full: the step in flight was read before the next was planned")
                return NO_ROWS
            self._free_some()

    def _of_one_kind(self, rows: RowIndex) -> RowIndex:
        """Where passes must not be mixed, rows that were forced ahead first, alone."""
        state = self._state
        forced = state.memory.arrays.forced
        if not forced or state.settings.mixed_batch:
            return rows
        ahead = rows[[row in forced for row in rows.tolist()]]
        return ahead if ahead.shape[0] else rows

    def _must_read_first(self, pages: int) -> bool:
        """Whether the step in flight gives back what is missing, or is all that could."""
        state = self._state
        if not state.in_flight:
            return False
        if state.memory.slots.num_free_pages + state.memory.num_held_pages >= pages:
            return True
        return len(state.running) < 2 or self._victim() is None

    def _victim(self) -> Request | None:
        """Fewest generated tokens first, then the longest prompt; None while a step in flight computes its prompt."""
        state = self._state
        rows, arrays = state.running.rows, state.memory.arrays
        order = np.lexsort((-arrays.num_prompt[rows], arrays.generated[rows] + arrays.pending[rows]))
        row = int(rows[order[0]])
        if arrays.prefix_len[row] > arrays.safe_len[row]:
            return None
        return arrays.requests[row]

    def _free_some(self) -> None:
        """Retract one request; if only one is left, the half-prefilled one, or the last one ends with an error."""
        state = self._state
        if len(state.running) < 2 and state.half_done is not None:
            state.retract(state.half_done, "pool full")
            return
        request = self._victim()
        assert request is not None, "without steps in flight every row can be retracted"
        if len(state.running) < 2:
            self._fail(request)
            return
        state.leave_running(request)
        rows, arrays = state.running.rows, state.memory.arrays
        generated = int((arrays.generated[rows] + arrays.pending[rows]).sum())
        state.ratio.raise_after_retraction(generated, int(arrays.max_new[rows].sum()), int(rows.shape[0]))
        state.requeue(request, "pool full")

    def _fail(self, request: Request) -> None:
        state = self._state
        message = (
            f"The KV pool of {state.settings.num_slots} tokens is too small for this request alone: it has "
            f"{request.num_prompt} prompt and {len(request.output_ids)} output tokens. Raise --max-total-tokens."
        )
        state.finish(request, FinishReason(FinishKind.ERROR, message=message))
        state.outputs.append(output_of(request))
