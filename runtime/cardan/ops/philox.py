"""Counter-based random numbers: Philox4x32-10, and the Gumbel noise that sampling adds to logits.

It knows no array library but numpy; platforms hold their own versions against this one.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cardan.types import Float32Array

UInt32Array: TypeAlias = npt.NDArray[np.uint32]

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW_HALF = 0xFFFFFFFF


def _split_product(multiplier: int, word: UInt32Array) -> tuple[UInt32Array, UInt32Array]:
    """High and low half of a 32 x 32 bit product."""
    product = word.astype(np.uint64) * np.uint64(multiplier)
    return (product >> np.uint64(32)).astype(np.uint32), product.astype(np.uint32)


def philox4x32(
    counter: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike, npt.ArrayLike],
    key: tuple[npt.ArrayLike, npt.ArrayLike],
) -> tuple[UInt32Array, UInt32Array, UInt32Array, UInt32Array]:
    """Ten rounds of Philox over uint32 counter and key words that broadcast against each other.

    Returns the four words of each block.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
    """
    words = tuple(np.asarray(word, dtype=np.uint32) for word in (*counter, *key))
    c0, c1, c2, c3, k0, k1 = np.broadcast_arrays(*words)
    for round_index in range(ROUNDS):
        bump0, bump1 = (np.uint32(round_index * step & LOW_HALF) for step in WEYL)
        high0, low0 = _split_product(MULTIPLIERS[0], c0)
        high1, low1 = _split_product(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ _wrapping_add(k0, bump0), low1, high0 ^ c3 ^ _wrapping_add(k1, bump1), low0
    return c0, c1, c2, c3


def _wrapping_add(words: UInt32Array, amount: np.uint32) -> UInt32Array:
    """Sum modulo 2^32, without numpy's overflow warning for scalars."""
    return (words.astype(np.uint64) + np.uint64(amount)).astype(np.uint32)


def gumbel(seeds: np.ndarray[Any, Any], positions: np.ndarray[Any, Any], ids: npt.ArrayLike | int) -> Float32Array:
    """Gumbel noise of token ``ids`` at ``positions: int32 [rows]`` under ``seeds: uint64 [rows]``.

    ``ids`` is int32 ``[rows, k]``, or the width of the vocabulary for all ids in order. The definition stands at
    ``Ops.gumbel``. Returns float32 ``[rows, k]``, always finite.
    """
    seeds = np.asarray(seeds, dtype=np.uint64)[:, None]
    key = ((seeds & np.uint64(LOW_HALF)).astype(np.uint32), (seeds >> np.uint64(32)).astype(np.uint32))
    place = np.asarray(positions).astype(np.uint32)[:, None]
    if isinstance(ids, int):
        blocks = np.arange((ids + 3) // 4, dtype=np.uint32)[None, :]
        words = np.stack(philox4x32((blocks, place, 0, 0), key), axis=-1)
        return _noise_of_words(words.reshape(len(seeds), 4 * blocks.shape[1])[:, :ids])
    wanted = np.asarray(ids).astype(np.uint32)
    words = np.stack(philox4x32((wanted >> np.uint32(2), place, 0, 0), key), axis=-1)
    lane = (wanted & np.uint32(3)).astype(np.int64)[..., None]
    return _noise_of_words(np.take_along_axis(words, lane, axis=-1)[..., 0])


def _noise_of_words(words: UInt32Array) -> Float32Array:
    """``-log(-log((word + 0.5) / 2^32))``, computed in float64 and rounded once."""
    uniform = (words.astype(np.float64) + 0.5) / 2.0**32
    return (-np.log(-np.log(uniform))).astype(np.float32)
