"""Gumbel noise from Philox4x32-10, with the bits of ``cardan.ops.philox``.

It knows no sampling: only seeds, positions and token ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cardan_kernels import tuning
from cardan_kernels.chips import chip_of
from cardan_kernels.launching import on_device_of


def gumbel(
    seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor | int, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Noise as ``Ops.gumbel`` defines it, everything on the device.

    Args:
        seeds: int32 ``[rows, 2]``, low then high halves.
        positions: int32 ``[rows]``.
        ids: int32 ``[rows, k]``, or the width of the vocabulary for all ids in order.
        out: float32 ``[rows, k]``, contiguous, written to; a new tensor where None.

    Returns float32 ``[rows, k]``.
    """
    rows = positions.shape[0]
    width = ids if isinstance(ids, int) else ids.shape[1]
    if out is None:
        out = torch.empty((rows, width), dtype=torch.float32, device=positions.device)
    if rows == 0 or width == 0:
        return out
    config = tuning.choose("gumbel", chip_of(positions.device), {"rows": rows, "columns": width})
    block = config["block"]
    given = None if isinstance(ids, int) else ids
    with on_device_of(positions):
        _gumbel_kernel[(rows, triton.cdiv(width, block))](
            seeds, positions, given, out, width, BLOCK=block, num_warps=config.num_warps
        )
    return out


@triton.jit
def _gumbel_kernel(seeds_ptr, positions_ptr, ids_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    low, high, place = key_of(seeds_ptr, positions_ptr, row)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if ids_ptr is None:
        noise = noise_of_run(tl.program_id(1) * BLOCK, low, high, place, BLOCK)
    else:
        ids = tl.load(ids_ptr + row.to(tl.int64) * width + at, at < width, 0)
        c0, c1, c2, c3 = philox((ids >> 2).to(tl.uint32, bitcast=True), place, low, high)
        lane = ids & 3
        noise = noise_of_words(tl.where(lane < 2, tl.where(lane == 0, c0, c1), tl.where(lane == 2, c2, c3)))
    tl.store(out_ptr + row.to(tl.int64) * width + at, noise, at < width)


@triton.jit
def key_of(seeds_ptr, positions_ptr, row):
    """Both halves of a row's seed, and its position, uint32."""
    low = tl.load(seeds_ptr + 2 * row).to(tl.uint32, bitcast=True)
    high = tl.load(seeds_ptr + 2 * row + 1).to(tl.uint32, bitcast=True)
    place = tl.load(positions_ptr + row).to(tl.uint32, bitcast=True)
    return low, high, place


@triton.jit
def noise_of_run(first, low, high, place, BLOCK: tl.constexpr):
    """Noise of ``BLOCK`` ids from ``first`` on, a multiple of 4: one block of four words serves four ids."""
    counter = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    c0, c1, c2, c3 = philox(counter, place, low, high)
    words = tl.join(tl.join(c0, c2), tl.join(c1, c3))
    return noise_of_words(tl.reshape(words, (BLOCK,)))


@triton.jit
def philox(counter, place, low, high):
    """The four words of blocks ``(counter, place, 0, 0)`` under key ``(low, high)``, all uint32.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
    """
    c0 = counter
    c1 = tl.zeros_like(counter) + place
    c2 = tl.zeros_like(counter)
    c3 = tl.zeros_like(counter)
    k0 = c2 + low
    k1 = c2 + high
    for _ in range(10):
        high_0, low_0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high_1, low_1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def noise_of_words(words):
    """``-log(-log((word + 0.5) / 2^32))``, computed in float64 and rounded once."""
    uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(uniform))).to(tl.float32)
