"""A weight whose columns stand in another order than the activations: those are brought into it first.

It knows no format: what it holds is a ``PackedWeight`` as any other.
"""

from __future__ import annotations

from cardan.ops import Ops
from cardan.platform import PackedWeight
from cardan.types import Array, Int32Array


class OrderedWeight(PackedWeight):
    """Act-order: columns that share a scale were put side by side.

    Attributes:
        packed: the weight with its columns in that order.
    """

    def __init__(self, ops: Ops, packed: PackedWeight, order: Int32Array) -> None:
        """Hold ``packed``; ``order`` is the column of the activations that each of its columns belongs to."""
        self.packed = packed
        self._ops = ops
        self._order = ops.from_host(order, "int32")
        self._order_bytes = order.nbytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight and of the order."""
        return self.packed.num_bytes + self._order_bytes

    def apply(self, x: Array) -> Array:
        """See ``PackedWeight.apply``."""
        return self.packed.apply(self._ops.permute_columns(x, self._order))

    def gather(self, ids: Array) -> Array:
        """Refused: the columns of rows would have to be put back, so the loader never makes such an embedding."""
        raise TypeError("a weight with columns in another order is no embedding; the loader widens such embeddings")
