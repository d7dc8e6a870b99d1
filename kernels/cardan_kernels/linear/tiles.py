"""What kernels of tiles share: which tile a block computes, and how the parts of a split sum come together.

It knows no codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FINISH_BLOCK = 1024


@triton.jit
def tile_of(block, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Row and column of a block's tile.

    ``GROUP_M`` tiles below each other are computed before the next column, so that their columns of the weight are
    read from cache.
    """
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    a_band = GROUP_M * tiles_n
    first = block // a_band * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    within = block % a_band
    return first + within % height, within // height


@triton.jit
def end(total, bias_ptr, residual_ptr, out_ptr, row_ids, places, rows, columns, residual_stride, out_stride):
    """Add what there is of bias and residual to a tile of sums, float32, and store it."""
    inside = places < columns
    written = (row_ids < rows)[:, None] & inside[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + places, inside, 0.0).to(tl.float32)[None, :]
    if residual_ptr is not None:
        residual_at = residual_ptr + row_ids[:, None].to(tl.int64) * residual_stride + places[None, :]
        total += tl.load(residual_at, written, 0.0).to(tl.float32)
    out_at = out_ptr + row_ids[:, None].to(tl.int64) * out_stride + places[None, :]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), written)


def finish(partials: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, out: torch.Tensor) -> None:
    """Sum ``partials: float32 [splits, rows, columns]``, always in the same order, with bias and residual."""
    splits, rows, columns = partials.shape
    _finish_kernel[(rows, triton.cdiv(columns, FINISH_BLOCK))](
        partials,
        bias,
        residual,
        out,
        rows,
        columns,
        out.stride(0),
        0 if residual is None else residual.stride(0),
        SPLITS=splits,
        BLOCK=FINISH_BLOCK,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["rows"])
def _finish_kernel(
    partials_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    rows,
    columns,
    out_stride,
    residual_stride,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partials_ptr + (split * rows + row) * columns + at, inside, 0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + at, inside, 0.0).to(tl.float32)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + row * residual_stride + at, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + at, total.to(out_ptr.dtype.element_ty), inside)
