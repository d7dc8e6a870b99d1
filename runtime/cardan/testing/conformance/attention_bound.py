"""How far attention's results may be off: derived from the roundings of scores, exponentials, shares and sums.

It knows no backend. Scores and sums are taken to be in float32; where activations are narrower, a backend may keep
scores and shares in their type, and that is allowed for.
"""

from __future__ import annotations

import numpy as np

from cardan.ops.definitions import NumpyArray
from cardan.ops.rounding import ROUNDOFF, SMALLEST, gamma
from cardan.references.attention import Attended
from cardan.testing.conformance.kv_rounding import kept_off
from cardan.types import LayerKV

FLOAT32 = ROUNDOFF["float32"]
PRODUCT_ROUNDINGS = 3
"""Of a score: the scale, its product with the query or the sum, and the query's own conversion."""
CAP_ROUNDINGS = 6
"""Of a soft-capped score: a quotient, a hyperbolic tangent that is good to two units, and a product."""
NARROW_SCORE_ROUNDINGS = 2
"""Of a score that is kept in the activations' type: as it is written and as its largest is taken off."""
EXPONENTIAL_ROUNDINGS = 4
"""Of an exponential and its quotient by the sum, beside what its argument's last bit does."""


def attention_bound(
    q: NumpyArray, k: NumpyArray, v: NumpyArray, layer: LayerKV, exact: Attended, dtypes: str | tuple[str, str]
) -> NumpyArray:
    """How far each result of ``attend(q, k, v, layer)`` may be off; ``[n, q_heads * v_dim]``.

    ``dtypes`` is the type of the activations, or that and the type of the pool where it keeps less.

    A share ``p`` whose score is off by ``ε`` is off by ``p (ε + Σ p ε)``, since all shares together stay 1. Where the
    pool keeps keys and values in fewer bits, each may be off by half a step, a score by what its keys' half steps
    times the query come to, and a result by the half steps of its values, weighed by the shares as they then are.
    """
    dtype, kv_dtype = (dtypes, dtypes) if isinstance(dtypes, str) else dtypes
    keys_off, values_off = kept_off(k, kv_dtype, layer.k_scale), kept_off(v, kv_dtype, layer.v_scale)
    shared = layer.q_heads // layer.kv_heads
    narrow = ROUNDOFF[dtype] if dtype != "float32" else 0.0
    sums = gamma(layer.k_dim, exact.scores.size) + PRODUCT_ROUNDINGS * FLOAT32
    weighing = narrow + 2 * gamma(len(k), exact.out.size) + EXPONENTIAL_ROUNDINGS * FLOAT32
    allowed = np.empty((len(q), layer.q_heads, layer.v_dim))
    for head in range(layer.q_heads):
        scores, shares = exact.scores[head], exact.weights[head]
        sizes = layer.scale * np.abs(q[:, head]) @ np.abs(k[:, head // shared]).T
        seen = np.isfinite(scores)
        score = np.where(seen, scores, 0.0)
        below = np.where(seen, np.abs(score - scores.max(axis=-1, keepdims=True)), 0.0)
        kept = layer.scale * np.abs(q[:, head]) @ keys_off[:, head // shared].T
        off = kept + sums * (sizes + kept) + FLOAT32 * below + NARROW_SCORE_ROUNDINGS * narrow * np.abs(score)
        if layer.softcap is not None:
            off += CAP_ROUNDINGS * FLOAT32 * np.abs(score)
        moved = shares * np.expm1(off)
        values = np.abs(v[:, head // shared])
        total = moved.sum(axis=-1, keepdims=True) + weighing
        allowed[:, head] = moved @ values + total * (shares @ values)
        allowed[:, head] += (shares + moved + total * shares) @ values_off[:, head // shared]
    result: NumpyArray = allowed.reshape(len(q), -1) + ROUNDOFF[dtype] * np.abs(exact.out) + SMALLEST[dtype]
    return result
