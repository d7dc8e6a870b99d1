"""The ops table: what models and the sampler may do with arrays, what each operation means, and how that is tried.

It knows no array library and no model.
"""

from cardan.ops.bounds import at_most
from cardan.ops.checking import Trial, run_case
from cardan.ops.opspec import OpSpec
from cardan.ops.reference import DenseWeight, ReferenceOps
from cardan.ops.rounding import round_to
from cardan.ops.specs import OP_SPECS
from cardan.ops.table import LogitAdjuster, Ops, Penalized, TokenDrawer

__all__ = [
    "OP_SPECS",
    "DenseWeight",
    "LogitAdjuster",
    "OpSpec",
    "Ops",
    "Penalized",
    "ReferenceOps",
    "TokenDrawer",
    "Trial",
    "at_most",
    "round_to",
    "run_case",
]
