"""An ops table of torch with this package's kernels in it, so that each is tried on its ``OpSpec``'s own cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cardan.ops import OP_SPECS, run_case
from cardan_kernels.activation import gelu_mul, silu_mul
from cardan_kernels.norm import add_rms_norm, rms_norm
from cardan_kernels.rope import Rotation, rope
from cardan_torch import TorchOps


class KernelOps(TorchOps):
    """Norms, gates and rotations by kernels, the rest by torch."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor, size: int) -> torch.Tensor:
        return silu_mul(gate_up, size)

    def gelu_mul(self, gate_up: torch.Tensor, size: int, approximate: bool) -> torch.Tensor:
        return gelu_mul(gate_up, size, approximate)

    def rope_prepare(self, positions: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
        return positions, Rotation(cos, sin, interleaved)

    def rope_apply(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        return rope(x, *prepared)


def largest_excess(name: str, dtype: str) -> float:
    """Over all cases of an operation's spec, the largest error over what the spec allows: up to 1 is fine."""
    spec = OP_SPECS[name]
    cases = list(spec.cases(np.random.default_rng(0)))
    assert cases
    return max(run_case(KernelOps(), spec, arguments, dtype, None).excess for arguments in cases)
