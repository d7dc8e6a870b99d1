"""Attention written out from its definition in float64 numpy; platforms' attention is compared with it."""

from __future__ import annotations

import numpy as np


def dense_attention(q, k, v, layer, sinks=None):
    """Queries stand at the end of the keys: ``q: [n, heads, dim]``, ``k, v: [length, kv_heads, dim]``."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    n, length = len(q), len(k)
    shared = layer.q_heads // layer.kv_heads
    out = np.zeros((n, layer.q_heads, layer.v_dim))
    for head in range(layer.q_heads):
        keys, values = k[:, head // shared], v[:, head // shared]
        for i in range(n):
            position = length - n + i
            first = 0 if layer.window is None else max(0, position - layer.window + 1)
            scores = keys[first : position + 1] @ q[i, head] * layer.scale
            if layer.softcap:
                scores = layer.softcap * np.tanh(scores / layer.softcap)
            top = scores.max() if sinks is None else max(scores.max(), sinks[head])
            weights = np.exp(scores - top)
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[head] - top))
            out[i, head] = weights @ values[first : position + 1] / total
    return out.reshape(n, -1)
