"""Linears over coded weights and plain activations: a matrix-vector kernel for few rows, tiles for many.

It knows no format of checkpoints: weights come in the layouts of ``cardan_kernels.linear.coding``. Codes are multiplied
as they are, exactly; each group's sum is scaled in float32. So nothing is rounded but sums, and the result once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cardan_kernels import tuning
from cardan_kernels.chips import chip_of
from cardan_kernels.launching import on_device_of
from cardan_kernels.linear.checks import Epilogue, check_linear
from cardan_kernels.linear.coding import CodedMatrix
from cardan_kernels.linear.decode import byte_values, high_values, low_values
from cardan_kernels.linear.tiles import Tiling, end, tile_of

MOST_GEMV_ROWS = 8
HALF_UNIT: tl.constexpr = tl.constexpr(16)


def coded_linear(
    x: torch.Tensor,
    weight: CodedMatrix,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``x @ weight.T + bias + residual``, summed in float32 and rounded once.

    Args:
        x: ``[rows, in_features]`` bfloat16, float16 or float32; each row contiguous.
        weight: on ``x``'s device.
        bias: ``[out_features]`` of any float type, or None.
        residual: ``[rows, out_features]`` of any float type, or None.
        out: ``[rows, out_features]``, written to; a new tensor where None.
        out_dtype: type of a new tensor; ``x``'s where None.

    Returns ``[rows, out_features]``.

    Raises:
        UnsupportedError: shapes or types do not fit.
    """
    epilogue = Epilogue(bias, residual, out, out_dtype)
    out = check_linear(x, weight.out_features, weight.in_features, epilogue)
    rows, columns = out.shape
    if rows == 0:
        return out
    chip = chip_of(x.device)
    shape = {"rows": rows, "out": columns, "in": weight.in_features, "group": weight.group}
    shape["bits"] = 8 * x.dtype.itemsize
    with on_device_of(x):
        if rows <= min(MOST_GEMV_ROWS, tuning.choose("coded_linear", chip, shape)["gemv_rows"]):
            _launch_gemv(x, weight, epilogue, out, tuning.choose("coded_gemv", chip, shape))
        else:
            _launch_gemm(x, weight, epilogue, out, tuning.choose("coded_gemm", chip, shape))
    return out


def coded_rows(
    ids: torch.Tensor, weight: CodedMatrix, dtype: torch.dtype, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows ``ids: int32 [n]`` of a weight, widened to ``dtype`` and rounded once: ``[n, in_features]``."""
    if out is None:
        out = torch.empty((ids.shape[0], weight.in_features), dtype=dtype, device=ids.device)
    if ids.shape[0] == 0:
        return out
    config = tuning.choose("coded_rows", chip_of(ids.device), {"in": weight.in_features})
    block = config["block_k"]
    with on_device_of(out):
        _rows_kernel[(ids.shape[0], triton.cdiv(weight.in_features, block))](
            ids,
            weight.codes,
            weight.scales,
            weight.offsets,
            out,
            weight.in_features,
            weight.out_features,
            weight.group,
            out.stride(0),
            CODING=int(weight.coding),
            BLOCK=block,
            num_warps=config.num_warps,
        )
    return out


def _part(group: int) -> int:
    """Elements that are summed before they are scaled: they are of one group."""
    return 128 if group % 128 == 0 else 64 if group % 64 == 0 else 32


def _launch_gemv(
    x: torch.Tensor, weight: CodedMatrix, epilogue: Epilogue, out: torch.Tensor, config: tuning.KernelConfig
) -> None:
    rows, columns = out.shape
    row_block = triton.next_power_of_2(rows)
    part = _part(weight.group)
    block_k = max(part, min(config["block_k"] // row_block, triton.next_power_of_2(weight.in_features)))
    _gemv_kernel[(triton.cdiv(columns, config["block_n"]),)](
        x,
        weight.codes,
        weight.scales,
        weight.offsets,
        epilogue.bias,
        epilogue.residual,
        out,
        rows,
        columns,
        weight.in_features,
        weight.group,
        x.stride(0),
        out.stride(0),
        epilogue.residual_stride,
        CODING=int(weight.coding),
        ROWS=row_block,
        BLOCK_N=config["block_n"],
        BLOCK_K=block_k,
        PART=part,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )


def _launch_gemm(
    x: torch.Tensor, weight: CodedMatrix, epilogue: Epilogue, out: torch.Tensor, config: tuning.KernelConfig
) -> None:
    block_k = min(_part(weight.group), config["block_k"])
    tiling = Tiling.of(out, epilogue, weight.in_features // block_k, config)
    _gemm_kernel[tiling.grid](
        x,
        weight.codes,
        weight.scales,
        weight.offsets,
        *tiling.ends,
        *out.shape,
        weight.in_features,
        weight.group // block_k,
        tiling.steps_a_split,
        x.stride(0),
        *tiling.strides,
        CODING=int(weight.coding),
        BLOCK_K=block_k,
        **tiling.constants,
    )
    tiling.finish()


@triton.jit(do_not_specialize=["rows"])
def _gemv_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    rows,
    columns,
    inner,
    group,
    x_stride,
    out_stride,
    residual_stride,
    CODING: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART: tl.constexpr,
):
    """Each block sums ``BLOCK_N`` rows of the weight with all rows of ``x``.

    ``PART`` elements of one group are summed before they are scaled; sums of parts are kept apart until the end, so
    that threads exchange as little as possible.
    """
    PARTS: tl.constexpr = BLOCK_K // PART
    A_BYTE: tl.constexpr = 2 if CODING <= 2 else 1
    places = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ids = tl.arange(0, ROWS)
    inside = places < columns
    total = tl.zeros((ROWS, BLOCK_N, PARTS), tl.float32)
    for start in range(0, inner, BLOCK_K):
        parts = start + PART * tl.arange(0, PARTS)
        numbers = (parts // group)[None, :] * columns + places[:, None]
        usable = inside[:, None] & (parts < inner)[None, :]
        at = start // A_BYTE + tl.arange(0, BLOCK_K // A_BYTE)
        within = at < inner // A_BYTE
        taken = (row_ids < rows)[:, None] & within[None, :]
        bytes_at = codes_ptr + places[:, None].to(tl.int64) * (inner // A_BYTE) + at[None, :]
        packed = tl.load(bytes_at, inside[:, None] & within[None, :], 0)
        x_at = x_ptr + row_ids[:, None].to(tl.int64) * x_stride
        if A_BYTE == 2:
            x_at += (at // HALF_UNIT * (2 * HALF_UNIT) + at % HALF_UNIT)[None, :]
            low = tl.load(x_at, taken, 0.0).to(tl.float32)
            high = tl.load(x_at + HALF_UNIT, taken, 0.0).to(tl.float32)
            product = low[:, None, :] * low_values(packed, CODING, tl.float32)[None, :, :]
            product += high[:, None, :] * high_values(packed, CODING, tl.float32)[None, :, :]
            x_sum = low + high
        else:
            x_sum = tl.load(x_at + at[None, :], taken, 0.0).to(tl.float32)
            product = x_sum[:, None, :] * byte_values(packed, CODING, tl.float32)[None, :, :]
        scale = tl.load(scales_ptr + numbers, usable, 0.0).to(tl.float32)
        total += tl.sum(tl.reshape(product, (ROWS, BLOCK_N, PARTS, PART // A_BYTE)), 3) * scale[None, :, :]
        if CODING == 1 or CODING == 4:
            offset = tl.load(offsets_ptr + numbers, usable, 0.0).to(tl.float32)
            total += tl.sum(tl.reshape(x_sum, (ROWS, PARTS, PART // A_BYTE)), 2)[:, None, :] * offset[None, :, :]
    result = tl.sum(total, 2)
    end(result, bias_ptr, residual_ptr, out_ptr, row_ids, places, rows, columns, residual_stride, out_stride)


@triton.jit(do_not_specialize=["rows"])
def _gemm_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    rows,
    columns,
    inner,
    steps_a_group,
    steps_a_split,
    x_stride,
    out_stride,
    residual_stride,
    CODING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """A tile of the result, or of a part of the inner axis; a step sums and scales ``BLOCK_K`` of one group."""
    tile_m, tile_n = tile_of(tl.program_id(0), rows, columns, BLOCK_M, BLOCK_N, GROUP_M)
    row_ids = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    places = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside, inside = row_ids < rows, places < columns
    first = tl.program_id(1) * steps_a_split
    last = tl.minimum(first + steps_a_split, inner // BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(first, last):
        numbers = step // steps_a_group * columns + places
        scale = tl.load(scales_ptr + numbers, inside, 0.0).to(tl.float32)
        if CODING <= 2:
            at = step * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
            low_at = (at // HALF_UNIT * (2 * HALF_UNIT) + at % HALF_UNIT)[None, :]
            x_at = x_ptr + row_ids[:, None].to(tl.int64) * x_stride + low_at
            low = tl.load(x_at, row_inside[:, None], 0.0)
            high = tl.load(x_at + HALF_UNIT, row_inside[:, None], 0.0)
            bytes_at = codes_ptr + places[None, :].to(tl.int64) * (inner // 2) + at[:, None]
            packed = tl.load(bytes_at, inside[None, :], 0)
            part = tl.dot(low, low_values(packed, CODING, low.dtype), input_precision="ieee")
            part = tl.dot(high, high_values(packed, CODING, low.dtype), part, input_precision="ieee")
            if CODING == 1:
                x_sum = tl.sum(low.to(tl.float32) + high.to(tl.float32), 1)
        else:
            at = step * BLOCK_K + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + row_ids[:, None].to(tl.int64) * x_stride + at[None, :], row_inside[:, None], 0.0)
            packed = tl.load(codes_ptr + places[None, :].to(tl.int64) * inner + at[:, None], inside[None, :], 0)
            part = tl.dot(x, byte_values(packed, CODING, x.dtype), input_precision="ieee")
            if CODING == 4:
                x_sum = tl.sum(x.to(tl.float32), 1)
        total += part * scale[None, :]
        if CODING == 1 or CODING == 4:
            offset = tl.load(offsets_ptr + numbers, inside, 0.0).to(tl.float32)
            total += x_sum[:, None] * offset[None, :]
    out_ptr += tl.program_id(1).to(tl.int64) * rows * out_stride
    end(total, bias_ptr, residual_ptr, out_ptr, row_ids, places, rows, columns, residual_stride, out_stride)


@triton.jit
def _rows_kernel(
    ids_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    out_ptr,
    inner,
    columns,
    group,
    out_stride,
    CODING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Widens ``BLOCK`` elements of one row."""
    row = tl.load(ids_ptr + tl.program_id(0)).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    if CODING == 0 or CODING == 1 or CODING == 2:
        byte_at = at // (2 * HALF_UNIT) * HALF_UNIT + at % HALF_UNIT
        packed = tl.load(codes_ptr + row * (inner // 2) + byte_at, inside, 0)
        is_high = at // HALF_UNIT % 2 == 1
        value = tl.where(is_high, high_values(packed, CODING, tl.float32), low_values(packed, CODING, tl.float32))
    else:
        value = byte_values(tl.load(codes_ptr + row * inner + at, inside, 0), CODING, tl.float32)
    numbers = (at // group).to(tl.int64) * columns + row
    value *= tl.load(scales_ptr + numbers, inside, 0.0).to(tl.float32)
    if CODING == 1 or CODING == 4:
        value += tl.load(offsets_ptr + numbers, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * out_stride + at, value.to(out_ptr.dtype.element_ty), inside)
