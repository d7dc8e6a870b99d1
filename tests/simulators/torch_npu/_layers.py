# ruff: noqa: A002  parameters have the documented names
"""Norms, rotations, gates and writes of the simulated torch_npu, computed in float32.

Sources: op-plugin, docs/context: torch_npu-npu_rms_norm.md, torch_npu-npu_add_rms_norm.md,
torch_npu-npu_rotary_mul.md, torch_npu-npu_swiglu.md and the page of npu_scatter_nd_update_.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from torch_npu import _tensor
from torch_npu._refusal import require, require_dtype

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def npu_rms_norm(self: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm, and the reciprocal of the root (torch_npu-npu_rms_norm.md)."""
    result: tuple[torch.Tensor, torch.Tensor] = _tensor.call(_rms_norm, (self, gamma, epsilon), {})
    return result


def npu_add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm of a sum, the reciprocal of the root, and the sum (torch_npu-npu_add_rms_norm.md)."""
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _tensor.call(_add_rms_norm, (x1, x2, gamma, epsilon), {})
    return result


def npu_rotary_mul(input: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half") -> torch.Tensor:
    """Rotation by cosines ``r1`` and sines ``r2`` (torch_npu-npu_rotary_mul.md)."""
    result: torch.Tensor = _tensor.call(_rotary_mul, (input, r1, r2, rotary_mode), {})
    return result


def npu_swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The first half's silu times the second (torch_npu-npu_swiglu.md)."""
    result: torch.Tensor = _tensor.call(_swiglu, (input, dim), {})
    return result


def npu_scatter_nd_update_(self: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """Write rows in place."""
    _tensor.call(_scatter_nd_update_, (self, indices, updates), {})
    return self


def _norm_arguments(x: torch.Tensor, gamma: torch.Tensor, function: str) -> None:
    require_dtype(x, FLOATS, function, "the input")
    require(gamma.dtype == x.dtype, function, f"gamma must have the type of the input, {x.dtype}, got {gamma.dtype}")
    require(
        gamma.dim() <= x.dim() and tuple(x.shape[x.dim() - gamma.dim() :]) == tuple(gamma.shape),
        function,
        f"gamma must have the last dimensions of the input {list(x.shape)}, got {list(gamma.shape)}",
    )


def _rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    _norm_arguments(x, gamma, "npu_rms_norm")
    return _normed(x.float(), gamma, epsilon, x.dtype)


def _normed(
    wide: torch.Tensor, gamma: torch.Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    dims = tuple(range(wide.dim() - gamma.dim(), wide.dim()))
    rstd = torch.rsqrt(wide.square().mean(dim=dims, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(dtype), rstd


def _add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    function = "npu_add_rms_norm"
    _norm_arguments(x1, gamma, function)
    require(x1.shape == x2.shape and x1.dtype == x2.dtype, function, "x1 and x2 must have the same shape and type")
    total = (x1.float() + x2.float()).to(x1.dtype)
    y, rstd = _normed(total.float(), gamma, epsilon, x1.dtype)
    return y, rstd, total


def _rotary_mul(x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str) -> torch.Tensor:
    function = "npu_rotary_mul"
    require(
        rotary_mode in ("half", "interleave"), function, f"rotary_mode must be half or interleave, got {rotary_mode!r}"
    )
    require_dtype(x, FLOATS, function, "input")
    require(x.dim() == r1.dim() == r2.dim() == 4, function, "input, r1 and r2 must have four dimensions")
    require(r1.dtype == r2.dtype == x.dtype, function, "r1 and r2 must have the type of input")
    require(r1.shape == r2.shape, function, "r1 and r2 must have the same shape")
    batch, length, heads, dim = x.shape
    require(dim < 896 and dim % 2 == 0, function, f"D must be even and below 896, got {dim}")
    require(batch < 1000 and heads < 1000, function, f"B and N must be below 1000, got {batch} and {heads}")
    shapes = [(1, length, 1, dim)] if rotary_mode == "interleave" else [(1, length, 1, dim), (batch, length, 1, dim)]
    require(tuple(r1.shape) in shapes, function, f"r1 must be one of {shapes} for input {list(x.shape)}")
    within = bool((r1.abs() <= 1).all()) and bool((r2.abs() <= 1).all())
    require(within, function, "r1 and r2 must be within -1 .. 1")
    if rotary_mode == "interleave":
        require(batch * heads < 1000, function, "B * N must be below 1000 in mode interleave")
        pairs = x.float().unflatten(-1, (dim // 2, 2))
        turned = torch.stack((-pairs[..., 1], pairs[..., 0]), dim=-1).flatten(-2)
    else:
        first, second = x.float().chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    return (x.float() * r1.float() + turned * r2.float()).to(x.dtype)


def _swiglu(x: torch.Tensor, dim: int) -> torch.Tensor:
    function = "npu_swiglu"
    require_dtype(x, FLOATS, function, "input")
    require(x.numel() > 0, function, "input must not be empty")
    require(x.is_contiguous(), function, "input must be contiguous")
    require(x.shape[dim] % 2 == 0, function, f"dimension {dim} must be even, got {x.shape[dim]}")
    first, second = x.float().chunk(2, dim=dim)
    return (functional.silu(first) * second).to(x.dtype)


def _scatter_nd_update_(target: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    function = "npu_scatter_nd_update_"
    allowed = (*FLOATS, torch.bool, torch.int64, torch.int8)
    require_dtype(target, allowed, function, "self")
    require(updates.dtype == target.dtype, function, "updates must have the type of self")
    require_dtype(indices, (torch.int32, torch.int64), function, "indices")
    require(indices.dim() >= 2, function, f"indices must have two dimensions at least, got {indices.dim()}")
    depth = indices.shape[-1]
    require(depth <= target.dim(), function, "the last dimension of indices must be at most the rank of self")
    wanted = (*indices.shape[:-1], *target.shape[depth:])
    require(tuple(updates.shape) == wanted, function, f"updates must be {list(wanted)}, got {list(updates.shape)}")
    places = indices.reshape(-1, depth).long()
    for axis in range(depth):
        column = places[:, axis]
        inside = column.numel() == 0 or (int(column.min()) >= 0 and int(column.max()) < target.shape[axis])
        require(inside, function, f"indices must be in 0 .. {target.shape[axis] - 1} on axis {axis}")
    target[tuple(places[:, axis] for axis in range(depth))] = updates.reshape(-1, *target.shape[depth:])
    return target
