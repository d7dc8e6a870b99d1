"""What GEMMs of tiles share: how they are launched, which tile a block computes, and how parts of a sum come together.

It knows no codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from cardan_kernels.linear.checks import Epilogue
from cardan_kernels.tuning import KernelConfig

FINISH_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Tiling:
    """A GEMM's launch: tiles of the result, each of which one block sums, or several where the inner axis is split.

    Attributes:
        out: ``[rows, columns]``, the result.
        epilogue: what is added to the sum.
        partials: float32 ``[splits, rows, columns]``, sums of parts of the inner axis; None where it is not split.
        steps_a_split: steps along the inner axis that a block makes.
        config: sizes of tiles.
    """

    out: torch.Tensor
    epilogue: Epilogue
    partials: torch.Tensor | None
    steps_a_split: int
    config: KernelConfig

    @classmethod
    def of(cls, out: torch.Tensor, epilogue: Epilogue, steps: int, config: KernelConfig) -> Tiling:
        """Choose how the inner axis is split.

        Args:
            out: ``[rows, columns]``.
            epilogue: what is added.
            steps: along the inner axis.
            config: sizes of tiles, and into how many parts the inner axis is split at most.
        """
        splits = max(1, min(config["split_k"], steps))
        partials = None
        if splits > 1:
            partials = torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device)
        return cls(out, epilogue, partials, triton.cdiv(steps, splits), config)

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks: of tiles, and of parts of the inner axis."""
        rows, columns = self.out.shape
        tiles = triton.cdiv(rows, self.config["block_m"]) * triton.cdiv(columns, self.config["block_n"])
        return tiles, 1 if self.partials is None else self.partials.shape[0]

    @property
    def ends(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
        """Bias, residual and target of the kernel: what is added to split sums is added in the end."""
        if self.partials is not None:
            return None, None, self.partials
        return self.epilogue.bias, self.epilogue.residual, self.out

    @property
    def strides(self) -> tuple[int, int]:
        """From row to row of the target, and of the residual."""
        return (self.out.stride(0) if self.partials is None else self.out.shape[1]), self.epilogue.residual_stride

    @property
    def constants(self) -> dict[str, Any]:
        """What the kernel is compiled with, but for its step along the inner axis."""
        return {
            "BLOCK_M": self.config["block_m"],
            "BLOCK_N": self.config["block_n"],
            "GROUP_M": self.config["group_m"],
            "num_warps": self.config.num_warps,
            "num_stages": self.config.num_stages,
            "enable_fp_fusion": True,
        }

    def finish(self) -> None:
        """Sum the parts, always in the same order, with bias and residual; nothing where there are none."""
        if self.partials is None:
            return
        splits, rows, columns = self.partials.shape
        _finish_kernel[(rows, triton.cdiv(columns, FINISH_BLOCK))](
            self.partials,
            self.epilogue.bias,
            self.epilogue.residual,
            self.out,
            rows,
            columns,
            self.out.stride(0),
            self.epilogue.residual_stride,
            SPLITS=splits,
            BLOCK=FINISH_BLOCK,
            num_warps=4,
        )


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
