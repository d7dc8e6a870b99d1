"""The masks of a step's rows, in buffers made once.

It knows no device; the loops of the engine ask for masks once everything before a step was committed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cardan.grammar.backend import MaskRows, ParallelMatcher
from cardan.grammar.session import GrammarSession

ALL = np.uint32(0xFFFFFFFF)


class MaskBuffers:
    """Masks for up to two steps in flight: those of a step stay as they are until the next but one."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        """Make the buffers.

        Args:
            num_rows: most rows of a step.
            vocab_size: columns of the model's logits.
        """
        shape = (num_rows, -(-vocab_size // 32))
        self._buffers = [np.zeros(shape, dtype=np.uint32) for _ in range(2)]

    def fill(self, grammars: Sequence[Any]) -> npt.NDArray[np.uint32]:
        """Masks ``uint32 [rows, words]``: those of grammars, and everything for rows that have none.

        Those that take work are made together where the backend can.
        """
        self._buffers.reverse()
        masks = self._buffers[0][: len(grammars)]
        together: dict[type, list[int]] = {}
        for index, grammar in enumerate(grammars):
            if not isinstance(grammar, GrammarSession):
                masks[index] = ALL
            elif isinstance(matcher := _matcher(grammar), ParallelMatcher):
                together.setdefault(type(matcher), []).append(index)
            else:
                grammar.fill(masks[index])
        for kind, rows in together.items():
            self._fill_together(kind, masks, {row: grammars[row] for row in rows})
        return masks

    @staticmethod
    def _fill_together(kind: Any, masks: MaskRows, sessions: Mapping[int, GrammarSession]) -> None:
        """Fill the masks of sessions, by row, whose matchers are of one kind."""
        if len(sessions) == 1:
            ((row, session),) = sessions.items()
            session.fill(masks[row])
            return
        started_s = time.perf_counter()
        kind.fill_many([session.matcher for session in sessions.values()], masks, list(sessions))
        taken_s = time.perf_counter() - started_s
        for row, session in sessions.items():
            session.take_filled(masks[row], taken_s)


def _matcher(session: GrammarSession) -> object:
    return session.matcher
