"""Checkpoints' blocks to neutral layouts, on the device that they are for.

It knows no GEMM. Values are kept: only where codes stand changes, and how often an equal scale is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from cardan.errors import UnsupportedError
from cardan.types import TensorView
from cardan_kernels.linear.coding import LAYOUTS, BlockLayout, CodedMatrix, Coding, ScaledMatrix

HALF_UNIT = 16
NAN_EXPONENT = 255
"""Of a scale that is one byte. Source: OCP Microscaling Formats (MX) Specification v1.0."""


def pack_coded(views: Sequence[TensorView], in_features: int, device: torch.device | str) -> CodedMatrix:
    """The rows of ``views``, all of one format and in order, as one matrix.

    Scales keep their type; where all of a row's are equal, one is kept.

    Raises:
        UnsupportedError: a format is unknown, formats differ, or bytes do not fill the rows.
    """
    fmt = views[0].dtype
    layout = LAYOUTS.get(fmt)
    if layout is None:
        raise UnsupportedError(
            f"{views[0].name} is {fmt}, and kernels take {', '.join(LAYOUTS)} without a change. Widen it first."
        )
    parts = [_part(view, fmt, layout, in_features, torch.device(device)) for view in views]
    codes = torch.cat([part.codes for part in parts]) if len(parts) > 1 else parts[0].codes
    scales = torch.cat([part.scales for part in parts])
    offsets = torch.cat([cast(torch.Tensor, part.offsets) for part in parts]) if layout.coding.has_offset else None
    group = layout.elements
    if _same_in_rows(scales) and (offsets is None or _same_in_rows(offsets)):
        scales, group = scales[:, :1], in_features
        offsets = None if offsets is None else offsets[:, :1]
    turned = None if offsets is None else offsets.T.contiguous()
    return CodedMatrix(layout.coding, codes, scales.T.contiguous(), turned, group, in_features)


def scaled_from(matrix: CodedMatrix, float8: torch.dtype | None) -> ScaledMatrix:
    """A matrix of signed bytes or floats of 8 bits, for codes on both sides.

    Args:
        matrix: of the coding ``INT8`` or ``FLOAT8``.
        float8: form of the chip's floats of 8 bits. In the form ``fnuz`` the same bits are worth half as much, so
            scales are doubled; the bits of -0, which are NaN there, become those of 0.

    Raises:
        UnsupportedError: codes are others, or the chip multiplies none of this kind.
    """
    scales = matrix.scales.to(torch.float32)
    if matrix.coding is Coding.INT8:
        return ScaledMatrix(matrix.codes.view(torch.int8), scales, matrix.group)
    if matrix.coding is not Coding.FLOAT8 or float8 not in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        raise UnsupportedError(
            f"Codes on both sides are int8, or E4M3 floats on a chip that multiplies them, got {matrix.coding.name} "
            f"for {float8}. Use the kernels for coded weights."
        )
    codes = matrix.codes
    if float8 is torch.float8_e4m3fnuz:
        codes = torch.where(codes == 0x80, torch.zeros_like(codes), codes)
        scales = 2 * scales
    return ScaledMatrix(codes.view(float8), scales, matrix.group)


def _part(view: TensorView, fmt: str, layout: BlockLayout, in_features: int, device: torch.device) -> CodedMatrix:
    """One view's rows; scales and offsets ``[rows, groups]``."""
    rows, rest = divmod(view.num_elements, in_features)
    blocks = in_features // layout.elements
    size = rows * blocks * layout.block_bytes
    if view.dtype != fmt or rest or in_features % layout.elements or len(view.data) != size:
        raise UnsupportedError(
            f"{view.name} must be {fmt} in rows of {in_features}, whole blocks of {layout.elements}, got {view.dtype} "
            f"{list(view.shape)} in {len(view.data)} bytes. Check that the checkpoint is whole."
        )
    raw = torch.from_numpy(np.frombuffer(view.data, np.uint8).copy()).to(device)
    raw = raw.reshape(rows, blocks, layout.block_bytes)
    codes = raw[:, :, layout.head_bytes :]
    _refuse_nan(view, layout, codes)
    if layout.interleaved:
        codes = _halves(codes)
    offsets = _numbers(raw, layout, 1) if layout.coding.has_offset else None
    matrix = CodedMatrix(
        layout.coding, codes.reshape(rows, -1).contiguous(), _numbers(raw, layout, 0), offsets, layout.elements, 0
    )
    return replace(matrix, in_features=in_features)


def _refuse_nan(view: TensorView, layout: BlockLayout, codes: torch.Tensor) -> None:
    if layout.coding is Coding.FLOAT8 and bool(((codes & 0x7F) == 0x7F).any()):
        raise UnsupportedError(f"{view.name} holds NaN among its floats of 8 bits. Fetch the checkpoint again.")


def _numbers(raw: torch.Tensor, layout: BlockLayout, which: int) -> torch.Tensor:
    """The first or second number of each block, ``[rows, blocks]``."""
    at = which * layout.scale_bytes
    numbers = raw[:, :, at : at + layout.scale_bytes].contiguous()
    if layout.scale is None:
        # codes are doubled, so that the power of two is halved
        exponents = numbers[:, :, 0].to(torch.int32)
        powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents - 128)
        return powers.masked_fill_(exponents == NAN_EXPONENT, float("nan"))
    return numbers.view(layout.scale)[:, :, 0]


def _halves(codes: torch.Tensor) -> torch.Tensor:
    """Bytes of two neighbours to bytes of elements 16 apart: ``[rows, blocks, bytes]``."""
    rows, blocks, _ = codes.shape
    each = torch.stack((codes & 15, codes >> 4), dim=-1).reshape(rows, blocks, -1, 2, HALF_UNIT)
    return (each[..., 0, :] | each[..., 1, :] << 4).reshape(rows, blocks, -1)


def _same_in_rows(numbers: torch.Tensor) -> bool:
    return bool((numbers == numbers[:, :1]).all())
