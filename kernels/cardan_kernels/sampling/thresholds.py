"""Where filters cut a row of scores off, found without a sort: by bisection of the order of floats.

It knows no noise. A cut ``(low, high, allowed)`` keeps scores whose key is at least ``high``, and of those from ``low``
up to it, which are all equal, the first ``allowed`` by id. A score weighs ``2^((score - best) * factor)``.
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
def cut(scores_ptr, vocab, best, factor, top_k, top_p, BLOCK: tl.constexpr):
    """The cut that top-k makes, then top-p in what is left; and the weight of what top-k keeps.

    Both are one search: for the fewest scores, largest first, that together reach a target; where each score weighs 1
    and the target is ``k``, or by their weights.
    """
    low = tl.full((), LOWEST_KEY, tl.int64)
    high = low
    allowed = vocab
    kept = best * 0.0
    for turn in range(2):
        by_weight = turn == 1
        wanted = tl.where(by_weight, top_p < 1.0, top_k < vocab)
        if wanted | by_weight:
            count, _, _, above, reached, _ = weigh(
                scores_ptr, vocab, high.to(tl.int32), low.to(tl.int32), low.to(tl.int32), best, factor, by_weight, BLOCK
            )
            each = _each(low, high, reached - above, best, factor, by_weight)
            kept = above + each * allowed.to(tl.float32) * (low < high).to(tl.float32)
            if wanted:
                target = tl.where(by_weight, top_p * kept, top_k.to(tl.float32))
                if above >= target:
                    beyond = key_of_score(best).to(tl.int64) + 1
                    low, high, above, within = _bisect(
                        scores_ptr, vocab, high, beyond, count, target, above, best, factor, by_weight, BLOCK
                    )
                    allowed = vocab
                    each = _each(low, high, within, best, factor, by_weight)
                needed = tl.ceil((target - above) / tl.maximum(each, 1e-37))
                allowed = tl.minimum(allowed, tl.minimum(tl.maximum(needed, 0.0), 1e9).to(tl.int32))
    return low, high, allowed, kept


@triton.jit
def weigh(scores_ptr, vocab, a, b, c, best, factor, by_weight, BLOCK: tl.constexpr):
    """How many scores have a key of at least ``a``, ``b`` and ``c``, and what they weigh: 1 each if not by weight."""
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
        weight = tl.where(by_weight, tl.exp2((score - best) * factor), 1.0)
        count_a += in_a.to(tl.int32)
        count_b += in_b.to(tl.int32)
        count_c += in_c.to(tl.int32)
        weight_a += tl.where(in_a, weight, 0.0)
        weight_b += tl.where(in_b, weight, 0.0)
        weight_c += tl.where(in_c, weight, 0.0)
    return (
        tl.sum(count_a, 0),
        tl.sum(count_b, 0),
        tl.sum(count_c, 0),
        tl.sum(weight_a, 0),
        tl.sum(weight_b, 0),
        tl.sum(weight_c, 0),
    )


@triton.jit
def _bisect(scores_ptr, vocab, low, high, count, target, weight, best, factor, by_weight, BLOCK: tl.constexpr):
    """The cut between keys, int64, where scores from ``low`` on weigh ``target`` or more and those from ``high`` less.

    ``count`` scores have a key of at least ``low`` and weigh ``weight``. Each pass cuts the range in four, until it
    holds one score, or equal ones. Returns its ends, the weight beyond, and that within.
    """
    count_high = count * 0
    weight_high = target * 0.0
    while (high - low > 1) & (count - count_high > 1):
        width = high - low
        a = low + (width + 3) // 4
        b = low + (2 * width + 3) // 4
        c = low + (3 * width + 3) // 4
        n_a, n_b, n_c, w_a, w_b, w_c = weigh(
            scores_ptr, vocab, a.to(tl.int32), b.to(tl.int32), c.to(tl.int32), best, factor, by_weight, BLOCK
        )
        if w_c >= target:
            low, count, weight = c, n_c, w_c
        elif w_b >= target:
            low, count, weight = b, n_b, w_b
            high, count_high, weight_high = c, n_c, w_c
        elif w_a >= target:
            low, count, weight = a, n_a, w_a
            high, count_high, weight_high = b, n_b, w_b
        else:
            high, count_high, weight_high = a, n_a, w_a
        if weight == target:
            high, count_high, weight_high = low, count, weight
    return low, high, weight_high, weight - weight_high


@triton.jit
def _each(low, high, within, best, factor, by_weight):
    """The weight of each of the equal scores of a cut: of the key ``low``, or of the one score within."""
    exact = tl.exp2((score_of_key(low.to(tl.int32)) - best) * factor)
    weight = tl.where(high - low == 1, exact, tl.where(high == low, 0.0, within))
    return tl.where(by_weight, weight, 1.0)
