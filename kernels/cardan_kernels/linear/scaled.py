"""Linears whose activations and weights are both codes of 8 bits: floats or whole numbers.

It knows no format of checkpoints. Products are summed by matrix units, in int32 or float32; scales come after.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cardan.errors import UnsupportedError
from cardan_kernels import tuning
from cardan_kernels.chips import chip_of
from cardan_kernels.launching import on_device_of
from cardan_kernels.linear.checks import Epilogue, check_epilogue
from cardan_kernels.linear.coding import ScaledMatrix
from cardan_kernels.linear.tiles import Tiling, end, tile_of


def scaled_linear(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: ScaledMatrix,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``(codes * scales) @ weight.T + bias + residual``, rounded once.

    Args:
        codes: ``[rows, in_features]`` of ``weight.codes``' type, as ``quantize_rows`` gives them.
        scales: float32 ``[rows, groups]``, one for each row or for each 128 of its elements.
        weight: on ``codes``' device.
        bias: ``[out_features]`` of any float type, or None.
        residual: ``[rows, out_features]`` of any float type, or None.
        out_dtype: type of a new tensor.
        out: ``[rows, out_features]``, written to; a new tensor where None.

    Returns ``[rows, out_features]``.

    Raises:
        UnsupportedError: shapes or types do not fit.
    """
    epilogue = Epilogue(bias, residual, out, out_dtype)
    out = check_epilogue(codes, weight.out_features, weight.in_features, epilogue, out_dtype)
    step = _step(codes, scales, weight)
    rows, columns = out.shape
    if rows == 0:
        return out
    shape = {"rows": rows, "out": columns, "in": weight.in_features, "group": step}
    config = tuning.choose("scaled_gemm", chip_of(codes.device), shape)
    with on_device_of(codes):
        _launch(codes, scales, weight, epilogue, out, config, step)
    return out


def _step(codes: torch.Tensor, scales: torch.Tensor, weight: ScaledMatrix) -> int:
    """Elements that are summed before they are scaled; 0 for whole rows.

    Raises:
        UnsupportedError: codes or scales do not fit the weight.
    """
    if codes.dtype is not weight.codes.dtype:
        raise UnsupportedError(f"codes must be {weight.codes.dtype} as the weight's, got {codes.dtype}.")
    inner = weight.in_features
    groups = scales.shape[1] if scales.dim() == 2 else 0
    if scales.dtype is not torch.float32 or scales.shape[0] != codes.shape[0] or groups not in (1, -(-inner // 128)):
        raise UnsupportedError(
            f"scales must be float32 [{codes.shape[0]}, 1] or [{codes.shape[0]}, {-(-inner // 128)}], got "
            f"{scales.dtype} {list(scales.shape)}. Quantize whole rows or groups of 128."
        )
    if groups == 1 and weight.group == inner:
        return 0
    if weight.group == inner or weight.group % 128 == 0:
        return 128
    return 64 if weight.group % 64 == 0 else 32


def _launch(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: ScaledMatrix,
    epilogue: Epilogue,
    out: torch.Tensor,
    config: tuning.KernelConfig,
    step: int,
) -> None:
    inner = weight.in_features
    block_k = step or config["block_k"]
    steps = triton.cdiv(inner, block_k)
    tiling = Tiling.of(out, epilogue, steps, config)
    _scaled_kernel[tiling.grid](
        codes,
        weight.codes,
        scales,
        weight.scales,
        *tiling.ends,
        *out.shape,
        inner,
        weight.group // block_k if step and weight.group < inner else steps,
        128 // block_k if step and scales.shape[1] > 1 else steps,
        tiling.steps_a_split,
        codes.stride(0),
        scales.stride(0),
        *tiling.strides,
        GROUPED=step > 0,
        BLOCK_K=block_k,
        **tiling.constants,
    )
    tiling.finish()


@triton.jit(do_not_specialize=["rows"])
def _scaled_kernel(
    x_ptr,
    codes_ptr,
    x_scales_ptr,
    scales_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    rows,
    columns,
    inner,
    steps_a_group,
    steps_an_x_group,
    steps_a_split,
    x_stride,
    x_scales_stride,
    out_stride,
    residual_stride,
    GROUPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """A tile of the result, or of one of the parts that the inner axis is split in."""
    WHOLE: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    SUM: tl.constexpr = tl.int32 if WHOLE else tl.float32
    tile_m, tile_n = tile_of(tl.program_id(0), rows, columns, BLOCK_M, BLOCK_N, GROUP_M)
    row_ids = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    places = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside = row_ids < rows
    inside = places < columns
    first = tl.program_id(1) * steps_a_split
    last = tl.minimum(first + steps_a_split, tl.cdiv(inner, BLOCK_K))
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32 if GROUPED else SUM)
    x_scales_at = x_scales_ptr + row_ids.to(tl.int64) * x_scales_stride
    for step in range(first, last):
        at = step * BLOCK_K + tl.arange(0, BLOCK_K)
        within = at < inner
        x = tl.load(
            x_ptr + row_ids[:, None].to(tl.int64) * x_stride + at[None, :], row_inside[:, None] & within[None, :], 0.0
        )
        codes = tl.load(
            codes_ptr + places[None, :].to(tl.int64) * inner + at[:, None], within[:, None] & inside[None, :], 0.0
        )
        part = tl.dot(x, codes, out_dtype=SUM)
        if GROUPED:
            scale = tl.load(scales_ptr + step // steps_a_group * columns + places, inside, 0.0)
            x_scale = tl.load(x_scales_at + step // steps_an_x_group, row_inside, 0.0)
            total += part.to(tl.float32) * x_scale[:, None] * scale[None, :]
        else:
            total += part
    result = total.to(tl.float32)
    if not GROUPED:
        scale = tl.load(scales_ptr + places, inside, 0.0)
        x_scale = tl.load(x_scales_at, row_inside, 0.0)
        result = result * x_scale[:, None] * scale[None, :]
    out_ptr += tl.program_id(1).to(tl.int64) * rows * out_stride
    end(result, bias_ptr, residual_ptr, out_ptr, row_ids, places, rows, columns, residual_stride, out_stride)
