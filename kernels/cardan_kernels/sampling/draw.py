"""From scores to tokens in one launch: greedy rows and draws under temperature, top-k, top-p and min-p together.

It knows no request. Filters keep what ``cardan.runner``'s sampler keeps, without a sort: a threshold is found by
bisection of the order of floats, and of equal scores at the threshold the lowest ids are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from cardan_kernels import tuning
from cardan_kernels.chips import chip_of
from cardan_kernels.launching import on_device_of
from cardan_kernels.sampling.noise import key_of, noise_of_run
from cardan_kernels.sampling.thresholds import LOWEST_KEY, cut, key_of_score

GREEDY_BELOW: tl.constexpr = tl.constexpr(1e-5)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawInputs:
    """How each row is drawn; all on the device, so that a graph may be replayed with other numbers.

    Attributes:
        temperature: float32 ``[rows]``; below 1e-5 a row is greedy.
        top_k: int32 ``[rows]``; the vocabulary's size or more where not restricted.
        top_p: float32 ``[rows]``; 1 where not restricted.
        min_p: float32 ``[rows]``; 0 where not restricted.
        seeds: int32 ``[rows, 2]``, low then high halves.
        positions: int32 ``[rows]``.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


def draw_tokens(
    scores: torch.Tensor,
    inputs: DrawInputs,
    *,
    logits: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    failed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token for each row, drawn by adding Gumbel noise to what filters keep.

    Args:
        scores: float32 ``[rows, vocab]``, contiguous rows.
        inputs: of the same rows.
        logits: the model's, where ``scores`` are not; a NaN among them fails the row.
        tokens: int32 ``[rows]``, written to; a new tensor where None.
        failed: bool ``[rows]``, written to; a new tensor where None.

    Returns tokens, 0 for a row that failed, and which rows did: those with a NaN, and those that may take no token.

    Source: Maddison et al., "A* Sampling", section 2 (the Gumbel-max trick).
    """
    rows, vocab = scores.shape
    if tokens is None:
        tokens = torch.empty(rows, dtype=torch.int32, device=scores.device)
    if failed is None:
        failed = torch.empty(rows, dtype=torch.bool, device=scores.device)
    if rows == 0:
        return tokens, failed
    config = tuning.choose("draw_tokens", chip_of(scores.device), {"rows": rows, "columns": vocab})
    with on_device_of(scores):
        _draw_kernel[(rows,)](
            scores,
            logits,
            inputs.temperature,
            inputs.top_k,
            inputs.top_p,
            inputs.min_p,
            inputs.seeds,
            inputs.positions,
            tokens,
            failed.view(torch.uint8),
            vocab,
            scores.stride(0),
            0 if logits is None else logits.stride(0),
            BLOCK=config["block"],
            num_warps=config.num_warps,
            enable_fp_fusion=False,
        )
    return tokens, failed


@triton.jit
def _draw_kernel(
    scores_ptr,
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    tokens_ptr,
    failed_ptr,
    vocab,
    scores_stride,
    logits_stride,
    BLOCK: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0)
    scores_ptr += row.to(tl.int64) * scores_stride
    best, token, broken = _best(scores_ptr, vocab, BLOCK)
    if logits_ptr is not None:
        broken = broken | _has_nan(logits_ptr + row.to(tl.int64) * logits_stride, vocab, BLOCK)
    failed = broken | (best == float("-inf"))
    temperature = tl.load(temperature_ptr + row)
    if (temperature >= GREEDY_BELOW) & (not failed):
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        low, high, place = key_of(seeds_ptr, positions_ptr, row)
        token = _draw(scores_ptr, vocab, best, temperature, top_k, top_p, min_p, low, high, place, BLOCK)
    tl.store(tokens_ptr + row, tl.where(failed, 0, token))
    tl.store(failed_ptr + row, failed.to(tl.uint8))


@triton.jit
def _best(scores_ptr, vocab, BLOCK: tl.constexpr):
    """The largest score, the first that has it, and whether there is a NaN."""
    best = float("-inf")
    token = 0
    nans = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        score = tl.load(scores_ptr + at, at < vocab, float("-inf"))
        is_nan = score != score
        nans |= is_nan.to(tl.int32)
        best, token = _better(best, token, tl.where(is_nan, float("-inf"), score), start)
    return best, token, tl.max(nans, 0) > 0


@triton.jit
def _better(best, token, score, start):
    """The larger of what is best so far and in a block, the first of equal ones."""
    here, at = tl.max(score, 0, return_indices=True)
    token = tl.where(here > best, start + at, token)
    return tl.maximum(here, best), token


@triton.jit
def _has_nan(logits_ptr, vocab, BLOCK: tl.constexpr):
    nans = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + at, at < vocab, 0.0)
        nans |= (logit != logit).to(tl.int32)
    return tl.max(nans, 0) > 0


@triton.jit
def _draw(scores_ptr, vocab, best, temperature, top_k, top_p, min_p, low, high, place, BLOCK: tl.constexpr):
    """From what top-k, then top-p, then min-p keep; without any of them, from the whole vocabulary."""
    cut_low = tl.full((), LOWEST_KEY, tl.int64)
    cut_high = cut_low
    allowed = vocab
    shift = temperature * 0.0
    again = shift
    floor = shift + float("-inf")
    if (top_k < vocab) | (top_p < 1.0) | (min_p > 0.0):
        factor = 1.4426950408889634 / temperature
        top = tl.div_rn(best, temperature)
        shift = tl.log(_weight_of_all(scores_ptr, vocab, best, factor, BLOCK)) + top
        cut_low, cut_high, allowed, kept = cut(scores_ptr, vocab, best, factor, top_k, top_p, BLOCK)
        again = tl.where(top_k < vocab, tl.log(kept) + (top - shift), 0.0)
        floor = top - shift - again + tl.log(min_p.to(tl.float64)).to(tl.float32)
    noisiest = float("-inf")
    token = 0
    ties = allowed * 0
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        score = tl.load(scores_ptr + at, at < vocab, float("-inf"))
        key = key_of_score(score)
        keep = key >= cut_high
        tie = (key >= cut_low) & (key < cut_high)
        tied = tl.sum(tie.to(tl.int32), 0)
        if tied > 0:
            rank = ties + tl.cumsum(tie.to(tl.int32), 0)
            keep = keep | (tie & (rank <= allowed))
            ties += tied
        share = tl.div_rn(score, temperature + tl.zeros_like(score)) - shift - again
        keep = keep & (share >= floor) & (score > float("-inf"))
        if tl.sum(keep.to(tl.int32), 0) > 0:
            noisy = share + noise_of_run(start, low, high, place, BLOCK)
            noisiest, token = _better(noisiest, token, tl.where(keep, noisy, float("-inf")), start)
    return token


@triton.jit
def _weight_of_all(scores_ptr, vocab, best, factor, BLOCK: tl.constexpr):
    weight = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        weight += tl.exp2((tl.load(scores_ptr + at, at < vocab, float("-inf")) - best) * factor)
    return tl.sum(weight, 0)
