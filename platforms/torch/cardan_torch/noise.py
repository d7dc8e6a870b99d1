"""Gumbel noise from Philox4x32-10 on any torch device, with the bits of ``cardan.ops.philox``.

It knows no sampling: only seeds, positions and token ids. Words of 32 bits are kept in int64, since torch has no
arithmetic on uint32; products wrap modulo 2^64, so their halves are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
MASK = 0xFFFFFFFF
ROUNDS = 10

NoiseOfWords: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Float32 noise of words of 32 bits, kept in int64."""

BLOCKS_PER_PASS = 1 << 17
"""Blocks in flight: 1 MiB an array keeps the six arrays of a round in a CPU's last-level cache."""


def gumbel(
    seeds: np.ndarray[Any, Any],
    positions: np.ndarray[Any, Any],
    ids: torch.Tensor | int,
    device: torch.device,
    of_words: NoiseOfWords | None = None,
) -> torch.Tensor:
    """Noise of ``ids: int32 [rows, k]`` or of all ids below a vocabulary's width; returns float32 ``[rows, k]``.

    One block of four words serves four neighbouring ids, so the whole vocabulary costs a quarter of its width.
    ``of_words`` takes the logarithms where a device does so in another way than in float64.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
    """
    return gumbel_of_keys(torch.from_numpy(philox_keys(seeds, positions)).to(device), ids, of_words)


def philox_keys(seeds: np.ndarray[Any, Any], positions: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What ``gumbel_of_keys`` takes, int64 ``[3, rows]``: low and high halves of the seeds, and positions."""
    keys = np.asarray(seeds, dtype=np.uint64)
    place = np.asarray(positions).astype(np.uint32)
    return np.stack((keys & np.uint64(MASK), keys >> np.uint64(32), place.astype(np.uint64))).astype(np.int64)


def gumbel_of_keys(keys: torch.Tensor, ids: torch.Tensor | int, of_words: NoiseOfWords | None = None) -> torch.Tensor:
    """As ``gumbel``, of seeds and positions that are on the device: ``keys`` from ``philox_keys``."""
    of_words = of_words or _noise_of_words
    low, high, place = keys[0][:, None], keys[1][:, None], keys[2][:, None]
    rows, device = keys.shape[1], keys.device
    if isinstance(ids, int):
        blocks = (ids + 3) // 4
        out = torch.empty((rows, blocks * 4), dtype=torch.float32, device=device)
        step = max(1, BLOCKS_PER_PASS // max(rows, 1))
        for start in range(0, blocks, step):
            stop = min(start + step, blocks)
            counter = torch.arange(start, stop, device=device).expand(rows, -1)
            words = torch.stack(_philox(counter, place, low, high), dim=-1)
            out[:, 4 * start : 4 * stop] = of_words(words.view(rows, 4 * (stop - start)))
        return out[:, :ids]
    wanted = ids.to(torch.int64)
    words = torch.stack(_philox(wanted >> 2, place, low, high), dim=-1)
    return of_words(words.gather(-1, (wanted & 3)[..., None])[..., 0])


def _philox(
    counter: torch.Tensor, place: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The four words of blocks ``(counter, place, 0, 0)`` under key ``(low, high)``."""
    first = counter * MULTIPLIER_0
    # the first round, with the two zero words of the counter folded in
    c0 = (place ^ low).expand_as(counter).clone()
    c1 = torch.zeros_like(first)
    c2 = ((first >> 32) & MASK) ^ high
    c3 = first & MASK
    product_0, product_1 = torch.empty_like(first), torch.empty_like(first)
    for _ in range(ROUNDS - 1):
        low, high = (low + WEYL_0) & MASK, (high + WEYL_1) & MASK
        torch.mul(c0, MULTIPLIER_0, out=product_0)
        torch.mul(c2, MULTIPLIER_1, out=product_1)
        torch.bitwise_right_shift(product_1, 32, out=c0)
        c0.bitwise_and_(MASK).bitwise_xor_(c1).bitwise_xor_(low)
        torch.bitwise_right_shift(product_0, 32, out=c2)
        c2.bitwise_and_(MASK).bitwise_xor_(c3).bitwise_xor_(high)
        torch.bitwise_and(product_1, MASK, out=c1)
        torch.bitwise_and(product_0, MASK, out=c3)
    return c0, c1, c2, c3


def _noise_of_words(words: torch.Tensor) -> torch.Tensor:
    """``-log(-log((word + 0.5) / 2^32))``, computed in float64 and rounded once."""
    uniform = words.to(torch.float64).add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_().to(torch.float32)
