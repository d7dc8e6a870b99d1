"""Root mean square normalization, alone or of a sum with the residual stream.

It knows no model.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", equation 4.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cardan.errors import UnsupportedError
from cardan_kernels.launching import on_device_of

MOST_FEATURES = 32768
"""Of a row, which one program keeps in registers."""
TILE = 4096
"""Elements of several short rows that share a program."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis of ``x: [..., features]``, computed in float32.

    Args:
        x: one to three axes, of which the last is contiguous and the others may be strided.
        weight: ``[features]`` of any float type.
        eps: added to the mean of squares.
        out: contiguous, of the shape and type of ``x``, for the result; may be ``x`` where that is contiguous.

    Raises:
        UnsupportedError: more features than the kernel takes, or strides that it does not know.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _launch(x, None, (weight, eps), (out, None))
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``s = x + residual``, rounded to the type of ``x``; returns ``(rms_norm(s), s)``.

    Args:
        x: ``[..., features]`` as ``rms_norm`` takes it.
        residual: of the same shape and type.
        weight: ``[features]``.
        eps: added to the mean of squares.
        out: contiguous, for the norm; may be ``x`` where that is contiguous.
        total: contiguous, for the sum; may be ``residual`` where that is contiguous.

    Raises:
        UnsupportedError: as ``rms_norm``.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device) if total is None else total
    _launch(x, residual, (weight, eps), (out, total))
    return out, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: tuple[torch.Tensor, float],
    results: tuple[torch.Tensor, torch.Tensor | None],
) -> None:
    weight, eps = norm
    features = x.shape[-1]
    if features > MOST_FEATURES or x.dim() > 3:
        raise UnsupportedError(
            f"rows to be normalized must have at most {MOST_FEATURES} features and two axes before them, got shape "
            f"{list(x.shape)}. Reshape it, or leave the norm to torch."
        )
    rows = x.numel() // max(features, 1)
    if rows == 0:
        return
    heads, outer, inner = _strides(x)
    _, residual_outer, residual_inner = (1, 0, 0) if residual is None else _strides(residual)
    columns = max(16, 1 << (features - 1).bit_length())
    together = max(1, min(TILE // columns, 1 << (rows - 1).bit_length()))
    with on_device_of(x):
        _rms_norm_kernel[(-(-rows // together),)](
            x,
            residual,
            weight,
            *results,
            rows,
            heads,
            outer,
            inner,
            residual_outer,
            residual_inner,
            eps,
            FEATURES=features,
            ROWS=together,
            COLUMNS=columns,
            num_warps=max(4, min(16, columns // 1024)),
        )


def _strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Rows of the last but one axis, and strides of both axes before the last."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise UnsupportedError(
            f"rows to be normalized must be contiguous, got strides {x.stride()}. Pass a contiguous tensor."
        )
    if x.dim() == 3:
        return x.shape[1], x.stride(0), x.stride(1)
    return 1, x.stride(0) if x.dim() == 2 else 0, 0


@triton.jit(do_not_specialize=["rows", "heads"])
def _rms_norm_kernel(
    x, residual, weight, out, total, rows, heads, outer, inner, residual_outer, residual_inner, eps,
    FEATURES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Several rows, each with all of its features."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < FEATURES)[None, :]
    token, head = (row // heads).to(tl.int64), row % heads
    values = tl.load(x + (token * outer + head * inner)[:, None] + column[None, :], mask=inside, other=0.0)
    result = row.to(tl.int64)[:, None] * FEATURES + column[None, :]
    wide = values.to(tl.float32)
    if residual is not None:
        places = (token * residual_outer + head * residual_inner)[:, None] + column[None, :]
        wide += tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
        narrow = wide.to(total.dtype.element_ty)
        tl.store(total + result, narrow, mask=inside)
        wide = narrow.to(tl.float32)
    mean = tl.sum(wide * wide, 1) / FEATURES
    factor = 1.0 / tl.sqrt(mean + eps)
    scales = tl.load(weight + column, mask=column < FEATURES, other=0.0).to(tl.float32)
    normed = wide * factor[:, None] * scales[None, :]
    tl.store(out + result, normed.to(out.dtype.element_ty), mask=inside)
