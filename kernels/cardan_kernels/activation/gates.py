"""Gated activations of a feed-forward block: SiLU and GELU of one half, times the other.

They know no model.
"""

from __future__ import annotations

import torch


def silu_mul(gate_up: torch.Tensor, size: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(gate) * up`` for ``gate_up: [tokens, 2 * size]``, computed in float32 and rounded once.

    Args:
        gate_up: gates, then the other half; the last axis is contiguous.
        size: features of a half.
        out: ``[tokens, size]`` of the same type, for the result.
    """


def gelu_mul(gate_up: torch.Tensor, size: int, approximate: bool, out: torch.Tensor | None = None) -> torch.Tensor:
    """``gelu(gate) * up``, exact or by the tanh approximation; else as ``silu_mul``."""
