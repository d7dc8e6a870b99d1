"""Attention as it is defined, over dense keys and values in numpy: what backends and whole models are compared with.

It knows no slots and no pages: queries stand at the end of the keys that they see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cardan.ops.definitions import NumpyArray
from cardan.types import LayerKV


@dataclass(frozen=True, slots=True)
class Attended:
    """One layer's attention, with what its rounding errors follow from.

    Attributes:
        out: ``[n, q_heads * v_dim]``.
        scores: ``[q_heads, n, keys]``, soft-capped where the layer says so, and ``-inf`` where a key is not seen.
        weights: ``[q_heads, n, keys]``, each query's shares; with a sink they add up to less than 1.
    """

    out: NumpyArray
    scores: NumpyArray
    weights: NumpyArray


def _as_it_is(x: NumpyArray) -> NumpyArray:
    return x


def attend(
    q: NumpyArray,
    k: NumpyArray,
    v: NumpyArray,
    layer: LayerKV,
    sinks: NumpyArray | None = None,
    narrow: Callable[[NumpyArray], NumpyArray] = _as_it_is,
) -> Attended:
    """Attention of ``q: [n, q_heads, k_dim]`` over ``k: [keys, kv_heads, k_dim]`` and ``v``, in the arrays' type.

    Args:
        q: queries of the last ``n`` positions.
        k: keys of all positions.
        v: values of all positions.
        layer: says what is seen, and how scores are scaled and capped.
        sinks: a score without a value for each query head, which takes its share of the softmax.
        narrow: rounds scores, shares and results, where those of a narrower type are asked for.

    Source: Vaswani et al., "Attention Is All You Need", equation 1; sinks: Xiao et al., "Efficient Streaming Language
    Models with Attention Sinks", section 3; soft-cap: Gemma Team, "Gemma 2", section 2.
    """
    count, length = len(q), len(k)
    keys, values = (np.repeat(part, layer.q_heads // layer.kv_heads, axis=1) for part in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, keys, optimize=True) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * np.tanh(scores / layer.softcap)
    scores = np.where(seen(layer, count, length), narrow(scores), -np.inf).astype(q.dtype)
    top = scores.max(axis=-1, keepdims=True)
    extra = np.zeros_like(top)
    if sinks is not None:
        column = sinks[:, None, None].astype(q.dtype)
        top = np.maximum(top, column)
        extra = np.exp(column - top)
    weights = np.exp(scores - top)
    weights = narrow(weights / (weights.sum(axis=-1, keepdims=True) + extra))
    out = narrow(np.einsum("hqk,khd->qhd", weights, values, optimize=True))
    return Attended(out.reshape(count, -1), scores, weights)


def seen(layer: LayerKV, count: int, length: int) -> NumpyArray:
    """Which of ``length`` keys each of the last ``count`` positions sees; bool ``[count, length]``."""
    distance = np.arange(length - count, length)[:, None] - np.arange(length)[None, :]
    visible: NumpyArray = (distance >= 0) & (distance < (layer.window or length + 1))
    return visible
