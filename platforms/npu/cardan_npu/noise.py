"""Gumbel noise on NPUs, which do not compute in float64: Philox's words are shared, their logarithms are taken here.

It knows no sampling: only seeds, positions and token ids.
"""

from __future__ import annotations

import torch

HALF = 1 << 31
MASK = 0xFFFFFFFF
STEP = 2.0**-32


def noise_of_words(words: torch.Tensor) -> torch.Tensor:
    """``-log(-log((word + 0.5) / 2^32))`` in float32, of int64 words.

    Above one half, ``1 - u`` keeps the digits that ``u`` would lose.
    """
    near_zero = words.to(torch.float32).add_(0.5).mul_(STEP).clamp_max_(0.5)
    near_one = (MASK - words).to(torch.float32).add_(0.5).mul_(STEP).clamp_max_(0.5)
    inner = torch.where(words >= HALF, near_one.neg_().log1p_().neg_(), near_zero.log_().neg_())
    return inner.log_().neg_()
