"""Gated activations of a feed-forward block: SiLU and GELU of one half, times the other.

They know no model.

Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", section 2; Shazeer, "GLU Variants Improve Transformer",
equation 5.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cardan.errors import UnsupportedError
from cardan_kernels.elementary import tanh
from cardan_kernels.launching import on_device_of

BLOCK = 1024
SILU, GELU, GELU_TANH = 0, 1, 2


def silu_mul(gate_up: torch.Tensor, size: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(gate) * up`` for ``gate_up: [tokens, 2 * size]``, computed in float32 and rounded once.

    Args:
        gate_up: gates, then the other half; the last axis is contiguous.
        size: features of a half.
        out: ``[tokens, size]`` of the same type, for the result.

    Raises:
        UnsupportedError: ``gate_up`` is not of that shape.
    """
    return _launch(gate_up, size, SILU, out)


def gelu_mul(gate_up: torch.Tensor, size: int, approximate: bool, out: torch.Tensor | None = None) -> torch.Tensor:
    """``gelu(gate) * up``, exact or by the tanh approximation; else as ``silu_mul``."""
    return _launch(gate_up, size, GELU_TANH if approximate else GELU, out)


def _launch(gate_up: torch.Tensor, size: int, gate: int, out: torch.Tensor | None) -> torch.Tensor:
    if gate_up.dim() != 2 or gate_up.shape[1] != 2 * size or (gate_up.numel() and gate_up.stride(1) != 1):
        raise UnsupportedError(
            f"gate_up must be [tokens, {2 * size}], contiguous in its last axis, got shape {list(gate_up.shape)} with "
            f"strides {gate_up.stride()}. Pass gates and the other half beside each other."
        )
    if out is None:
        out = gate_up.new_empty((gate_up.shape[0], size))
    if out.numel() == 0:
        return out
    with on_device_of(gate_up):
        _gate_kernel[(gate_up.shape[0], -(-size // BLOCK))](
            gate_up, out, gate_up.stride(0), out.stride(0), size, GATE=gate, BLOCK=BLOCK, num_warps=4
        )
    return out


@triton.jit
def _gate_kernel(gate_up, out, stride, out_stride, size, GATE: tl.constexpr, BLOCK: tl.constexpr):
    """A block of one token's features."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    x = tl.load(gate_up + token * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + size + column, mask=inside, other=0.0).to(tl.float32)
    if GATE == 0:
        opened = x / (1.0 + tl.exp(-x))
    elif GATE == 1:
        opened = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        opened = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    tl.store(out + token * out_stride + column, (opened * up).to(out.dtype.element_ty), mask=inside)
