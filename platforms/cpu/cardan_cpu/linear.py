"""Dense linears on CPUs without bfloat16 arithmetic: bfloat16 weights, float32 products.

It knows one thing that torch's GEMM does not: when widening a block of the weight first is faster.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from cardan.platform import PackedWeight
from cardan_torch import DenseLinear, DenseWeight

WIDEN_FROM_ROWS = 6
"""Rows of activations from which the float32 GEMM over a widened weight wins.

Measured on one AVX2 core without bfloat16, CPU time of all linears of a 135M model in ms, torch's bfloat16 GEMM
against widening: 4 rows 141 and 184, 6 rows 183 and 174, 8 rows 239 and 197, 16 rows 484 and 249, 32 rows 921 and 354.
"""

BLOCK_ELEMENTS = 1 << 20
"""Weight elements widened at a time: 4 MiB in float32 stay in the last-level cache until they are used."""


class WideningWeight(DenseWeight):
    """A bfloat16 weight whose products with many rows go through float32."""

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """See ``PackedWeight.apply``; accumulates in float32 and rounds once."""
        if x.shape[0] < WIDEN_FROM_ROWS:
            return functional.linear(x, self.weight, self.bias)
        wide = x.float()
        out_features, in_features = self.weight.shape
        step = max(1, BLOCK_ELEMENTS // in_features)
        out = x.new_empty((x.shape[0], out_features))
        for start in range(0, out_features, step):
            stop = min(start + step, out_features)
            bias = None if self.bias is None else self.bias[start:stop].float()
            out[:, start:stop] = functional.linear(wide, self.weight[start:stop].float(), bias)
        return out


class CpuDenseLinear(DenseLinear):
    """torch's GEMM, with bfloat16 widened where the processor cannot multiply it."""

    def __init__(self, has_bfloat16: bool) -> None:
        super().__init__("cpu")
        self.has_bfloat16 = has_bfloat16

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
        """A widening weight for bfloat16 without hardware, else a plain one."""
        if weight.dtype is torch.bfloat16 and not self.has_bfloat16:
            return WideningWeight(weight, bias)
        return DenseWeight(weight, bias)
