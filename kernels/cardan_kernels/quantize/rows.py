"""Activations to codes of 8 bits: each row, or each 128 of its elements, in steps of its own.

It knows no GEMM. A scale is the largest size over the largest code; codes are rounded to nearest even.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cardan.errors import UnsupportedError
from cardan_kernels import tuning
from cardan_kernels.chips import chip_of
from cardan_kernels.float8 import E4M3FN, E4M3FNUZ, encode
from cardan_kernels.launching import on_device_of

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}
"""The largest code of each type."""

GROUP = 128
_FORMATS = {torch.int8: 0, torch.float8_e4m3fn: E4M3FN.value, torch.float8_e4m3fnuz: E4M3FNUZ.value}


def quantize_rows(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    grouped: bool = False,
    codes: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of each row with its scale: ``x`` is about ``codes * scales``.

    Args:
        x: ``[rows, columns]`` bfloat16, float16 or float32; each row contiguous.
        dtype: of the codes: int8, or floats of 8 bits in the form of the chip.
        grouped: a scale for each 128 elements of a row instead of one; the last group may be shorter.
        codes: ``[rows, columns]``, contiguous, written to; a new tensor where None.
        scales: float32 ``[rows, groups]``, contiguous, written to; a new tensor where None.

    Returns codes and scales; of a row of zeros all codes are 0 and the scale is 1. Where there is NaN or an infinity
    among the elements that share a scale, the scale is NaN.

    Raises:
        UnsupportedError: there are no codes of this type, or ``x`` is of another.
    """
    if dtype not in LARGEST or x.dim() != 2 or not x.is_floating_point() or (x.numel() and x.stride(1) != 1):
        known = ", ".join(str(name).removeprefix("torch.") for name in LARGEST)
        raise UnsupportedError(
            f"Codes must be one of {known} and x floats in contiguous rows, got {dtype} for {x.dtype} {list(x.shape)}."
        )
    rows, columns = x.shape
    groups = triton.cdiv(columns, GROUP) if grouped else 1
    if codes is None:
        codes = torch.empty((rows, columns), dtype=dtype, device=x.device)
    if scales is None:
        scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    if rows == 0 or columns == 0:
        return codes, scales
    config = tuning.choose("quantize_rows", chip_of(x.device), {"rows": rows, "in": columns, "grouped": int(grouped)})
    written = codes if dtype is torch.int8 else codes.view(torch.uint8)
    kind = {"LARGEST": LARGEST[dtype], "FORMAT": _FORMATS[dtype], "num_warps": config.num_warps}
    with on_device_of(x):
        if grouped:
            grid = (rows, triton.cdiv(groups, config["groups"]))
            _groups_kernel[grid](
                x, written, scales, columns, groups, x.stride(0), GROUP=GROUP, GROUPS=config["groups"], **kind
            )
        else:
            block = min(config["block_k"], triton.next_power_of_2(columns))
            _rows_kernel[(rows,)](x, written, scales, columns, x.stride(0), BLOCK=block, **kind)
    return codes, scales


@triton.jit
def _rows_kernel(
    x_ptr, codes_ptr, scales_ptr, columns, x_stride, LARGEST: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr
):
    """One row: its largest size, then its codes; the second reading comes from cache."""
    row = tl.program_id(0).to(tl.int64)
    sizes = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        sizes = tl.maximum(sizes, _size(tl.load(x_ptr + row * x_stride + at, at < columns, 0.0).to(tl.float32)))
    scale = _scale(tl.max(sizes, 0), LARGEST)
    tl.store(scales_ptr + row, scale)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x_ptr + row * x_stride + at, at < columns, 0.0).to(tl.float32)
        tl.store(
            codes_ptr + row * columns + at,
            _codes(tl.div_rn(value, scale + tl.zeros_like(value)), LARGEST, FORMAT),
            at < columns,
        )


@triton.jit
def _groups_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    columns,
    groups,
    x_stride,
    LARGEST: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """``GROUPS`` groups of one row."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = tl.load(x_ptr + row * x_stride + at, at < columns, 0.0).to(tl.float32)
    scale = _scale(tl.max(_size(value), 1), LARGEST)
    tl.store(scales_ptr + row * groups + group, scale, group < groups)
    codes = _codes(tl.div_rn(value, scale[:, None] + tl.zeros_like(value)), LARGEST, FORMAT)
    tl.store(codes_ptr + row * columns + at, codes, at < columns)


@triton.jit
def _size(value):
    """Sizes, infinite those of NaN, which the largest of several numbers would leave out."""
    return tl.where(value == value, tl.abs(value), float("inf"))


@triton.jit
def _scale(size, LARGEST: tl.constexpr):
    """The step of codes up to a size; NaN for an infinite one."""
    return tl.where(size > 0.0, tl.div_rn(size, size * 0.0 + LARGEST), 1.0)


@triton.jit
def _codes(value, LARGEST: tl.constexpr, FORMAT: tl.constexpr):
    """Numbers within the largest code to codes; 1.5 * 2^23 leaves no digits behind the point, so adding it rounds."""
    if FORMAT == 0:
        value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
        codes = ((value + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        codes = encode(value, FORMAT)
    return codes
