"""The masks of a step's rows, in buffers made once.

It knows no device; the loops of the engine ask for masks once everything before a step was committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

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
        """Masks ``uint32 [rows, words]``: those of grammars, and everything for rows that have none."""
        self._buffers.reverse()
        masks = self._buffers[0][: len(grammars)]
        for index, grammar in enumerate(grammars):
            if isinstance(grammar, GrammarSession):
                grammar.fill(masks[index])
            else:
                masks[index] = ALL
        return masks
