"""Where filters cut a row of scores off, found without a sort: by bisection of the order of floats.

It knows no noise. A cut ``(low, high, allowed)`` keeps scores whose key is at least ``high``, and of those from ``low``
up to it, which are all equal, the first ``allowed`` by id.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST_KEY: tl.constexpr = tl.constexpr(-2139095041)
"""The key of ``-inf``."""


@triton.jit
def key_of_score(score):
    """Whole numbers in the order of the floats, those of 0 and -0 equal."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def score_of_key(key):
    """The float that has a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weigh(scores_ptr, vocab, a, b, c, best, factor, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """How many scores have a key of at least ``a``, ``b`` and ``c``, and their weights ``2^((score - best) factor)``.

    Without ``WEIGHTED`` each weighs 1.
    """
    count_a = tl.zeros((BLOCK,), tl.int32)
    count_b = tl.zeros((BLOCK,), tl.int32)
    count_c = tl.zeros((BLOCK,), tl.int32)
    weight_a = tl.zeros((BLOCK,), tl.float32)
    weight_b = tl.zeros((BLOCK,), tl.float32)
    weight_c = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < vocab
        score = tl.load(scores_ptr + at, inside, float("-inf"))
        key = key_of_score(score)
        in_a = inside & (key >= a)
        in_b = inside & (key >= b)
        in_c = inside & (key >= c)
        count_a += in_a.to(tl.int32)
        count_b += in_b.to(tl.int32)
        count_c += in_c.to(tl.int32)
        if WEIGHTED:
            weight = tl.exp2((score - best) * factor)
            weight_a += tl.where(in_a, weight, 0.0)
            weight_b += tl.where(in_b, weight, 0.0)
            weight_c += tl.where(in_c, weight, 0.0)
    n_a, n_b, n_c = tl.sum(count_a, 0), tl.sum(count_b, 0), tl.sum(count_c, 0)
    if WEIGHTED:
        w_a, w_b, w_c = tl.sum(weight_a, 0), tl.sum(weight_b, 0), tl.sum(weight_c, 0)
    else:
        w_a, w_b, w_c = n_a.to(tl.float32), n_b.to(tl.float32), n_c.to(tl.float32)
    return n_a, n_b, n_c, w_a, w_b, w_c


@triton.jit
def bisect(scores_ptr, vocab, low, high, count, target, best, factor, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """The cut below which scores are not needed to weigh ``target`` together.

    Scores with a key of at least ``low`` weigh at least as much, those of at least ``high`` less; both are int64.
    ``count`` is how many have a key of at least ``low``. Each pass over the scores cuts the range in four.
    Returns the keys ``low`` and ``high`` of a cut, and the weight of what is beyond ``high``.
    """
    count_high = count * 0
    weight_high = target * 0.0
    while (high - low > 1) & (count - count_high > 1):
        width = high - low
        a = low + (width + 3) // 4
        b = low + (2 * width + 3) // 4
        c = low + (3 * width + 3) // 4
        n_a, n_b, n_c, w_a, w_b, w_c = weigh(
            scores_ptr, vocab, a.to(tl.int32), b.to(tl.int32), c.to(tl.int32), best, factor, WEIGHTED, BLOCK
        )
        if w_c >= target:
            low, count = c, n_c
            exact = w_c == target
        elif w_b >= target:
            low, count = b, n_b
            high, count_high, weight_high = c, n_c, w_c
            exact = w_b == target
        elif w_a >= target:
            low, count = a, n_a
            high, count_high, weight_high = b, n_b, w_b
            exact = w_a == target
        else:
            high, count_high, weight_high = a, n_a, w_a
            exact = False
        if exact:
            high, weight_high = low, target
    return low, high, weight_high
