"""What requests do to logits before a token is chosen: penalties, a grammar's mask, sparse biases.

It knows no request: numbers of each row stand on the device. Arithmetic is that of ``cardan.runner``'s sampler, rounded
as often, so that scores are equal to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from cardan_kernels import tuning
from cardan_kernels.chips import chip_of
from cardan_kernels.launching import on_device_of

PLACES = 128
"""Places that share a program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Penalties of some rows of a batch.

    Attributes:
        lines: int32 ``[rows]``, the line of a row's counts; -1 where it has no penalties.
        prompt: float32 ``[lines, vocab]``, above 0 where a token occurs in the prompt.
        output: float32 ``[lines, vocab]``, how often a token occurs in the output.
        repetition: float32 ``[rows]``.
        frequency: float32 ``[rows]``.
        presence: float32 ``[rows]``.
    """

    lines: torch.Tensor
    prompt: torch.Tensor
    output: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseBias:
    """Biases of single tokens; ``-inf`` forbids one.

    Attributes:
        rows: int32 ``[m]``, which row; -1 where an entry stands for nothing, so that ``m`` may be fixed.
        ids: int32 ``[m]``, which token.
        values: float32 ``[m]``.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor


def adjust_logits(
    logits: torch.Tensor,
    *,
    penalties: Penalties | None = None,
    mask: torch.Tensor | None = None,
    bias: SparseBias | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores: logits with penalties, without what a mask forbids, and with biases.

    Args:
        logits: float32 ``[rows, vocab]``, contiguous rows; unchanged.
        penalties: of the rows that have some.
        mask: int32 ``[rows, ceil(vocab / 32)]``, packed bits of the tokens that are allowed; all ones where a row has
            none.
        bias: added last; repeated places are summed.
        out: float32 ``[rows, vocab]``, written to; a new tensor where None.
    """
    if out is None:
        out = torch.empty_like(logits)
    rows, vocab = logits.shape
    if rows == 0:
        return out
    config = tuning.choose("adjust_logits", chip_of(logits.device), {"rows": rows, "columns": vocab})
    block = config["block"]
    with on_device_of(logits):
        _adjust_kernel[(rows, triton.cdiv(vocab, block))](
            logits,
            out,
            None if penalties is None else penalties.lines,
            None if penalties is None else penalties.prompt,
            None if penalties is None else penalties.output,
            None if penalties is None else penalties.repetition,
            None if penalties is None else penalties.frequency,
            None if penalties is None else penalties.presence,
            mask,
            vocab,
            0 if mask is None else mask.stride(0),
            logits.stride(0),
            out.stride(0),
            BLOCK=block,
            num_warps=config.num_warps,
            enable_fp_fusion=False,
        )
    if bias is not None:
        add_at(out, bias.rows, bias.ids, bias.values)
    return out


def add_at(out: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> None:
    """Add ``values: float32 [m]`` to places of ``out: float32 [n, width]``, repeated ones summed in any order.

    Args:
        out: contiguous rows; changed in place.
        rows: int32 ``[m]``; -1 where an entry stands for nothing.
        columns: int32 ``[m]``.
        values: what is added.
    """
    count = rows.shape[0]
    if count == 0:
        return
    with on_device_of(out):
        _add_at_kernel[(triton.cdiv(count, PLACES),)](
            out, rows, columns, values, count, out.stride(0), BLOCK=PLACES, num_warps=4
        )


@triton.jit
def _adjust_kernel(
    logits_ptr,
    out_ptr,
    lines_ptr,
    prompt_ptr,
    output_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    mask_ptr,
    vocab,
    mask_stride,
    logits_stride,
    out_stride,
    BLOCK: tl.constexpr,
):
    """``BLOCK`` tokens of one row. Source of repetition: Keskar et al., "CTRL", section 4.1."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    score = tl.load(logits_ptr + row * logits_stride + at, inside, 0.0)
    if lines_ptr is not None:
        line = tl.load(lines_ptr + row).to(tl.int64)
        if line >= 0:
            output = tl.load(output_ptr + line * vocab + at, inside, 0.0)
            prompt = tl.load(prompt_ptr + line * vocab + at, inside, 0.0)
            repetition = tl.load(repetition_ptr + row) + tl.zeros_like(score)
            less = tl.where(score > 0.0, tl.div_rn(score, repetition), score * repetition)
            score = tl.where(output + prompt > 0.0, less, score)
            score = score - output * tl.load(frequency_ptr + row)
            score = tl.where(output > 0.0, score - tl.load(presence_ptr + row), score)
    if mask_ptr is not None:
        word = tl.load(mask_ptr + row * mask_stride + at // 32, inside, 0)
        score = tl.where((word >> (at % 32)) & 1 == 1, score, float("-inf"))
    tl.store(out_ptr + row * out_stride + at, score, inside)


@triton.jit
def _add_at_kernel(out_ptr, rows_ptr, columns_ptr, values_ptr, count, out_stride, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(rows_ptr + at, inside, -1)
    column = tl.load(columns_ptr + at, inside, 0)
    value = tl.load(values_ptr + at, inside, 0.0)
    tl.atomic_add(out_ptr + row.to(tl.int64) * out_stride + column, value, mask=inside & (row >= 0), sem="relaxed")
