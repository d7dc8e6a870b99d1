"""The ops table: what models and the sampler may do with arrays, what each operation means, and how that is tried.

It knows no array library and no model.
"""

from cardan.ops.checking import error_of, round_to, run_case
from cardan.ops.opspec import OpSpec
from cardan.ops.reference import DenseWeight, ReferenceOps
from cardan.ops.specs import OP_SPECS
from cardan.ops.table import Ops

__all__ = ["OP_SPECS", "DenseWeight", "OpSpec", "Ops", "ReferenceOps", "error_of", "round_to", "run_case"]
