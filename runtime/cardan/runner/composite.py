"""A weight made of parts that were packed apart, because their formats differ.

It knows no format: each part is a ``PackedWeight`` of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from cardan.ops import Ops
from cardan.platform import PackedWeight
from cardan.types import Array


class CompositeWeight(PackedWeight):
    """Parts whose outputs stand side by side: ``[q; k; v]`` where v has more bits than q and k."""

    def __init__(self, ops: Ops, parts: Sequence[PackedWeight]) -> None:
        self.ops = ops
        self.parts = tuple(parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.num_bytes for part in self.parts)

    def apply(self, x: Array) -> Array:
        """Each part's output, concatenated."""
        return self.ops.concat([part.apply(x) for part in self.parts])

    def gather(self, ids: Array) -> Array:
        """Refused: rows of several parts cannot be gathered at once, so the loader never makes such an embedding."""
        raise TypeError("a composite weight is no embedding; the loader widens embeddings of several formats")
