"""The ops table: what models and the sampler may do with arrays.

It knows no array library and no model.
"""

from cardan.ops.reference import DenseWeight, ReferenceOps
from cardan.ops.table import Ops

__all__ = ["DenseWeight", "Ops", "ReferenceOps"]
