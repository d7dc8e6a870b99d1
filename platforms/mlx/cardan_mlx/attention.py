"""Attention over slots by gathering: keys and values are taken by slot from the pool and the tail, then attended to.

It knows no model and no scheduler. Blocks of queries keep any score matrix within ``SCORE_BYTES``.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from cardan.platform import AttentionBackend, AttentionMeta
from cardan.types import LayerKV
from cardan_mlx.arrays import start
from cardan_mlx.attention_plan import DecodePart, ExtendBlock, ExtendRow, Planner, StepPlan
from cardan_mlx.kv_pool import MlxKVPool


class PagedDecode(Protocol):
    """A kernel that reads the pool and the tail in place, one query a row."""

    def __call__(self, q: mx.array, pool: MlxKVPool, layer: LayerKV, part: DecodePart) -> mx.array:
        """Attend with ``q: [rows, q_heads, k_dim]``; returns ``[rows, q_heads * v_dim]``."""

    def takes(self, layer: LayerKV, sinks: mx.array | None) -> bool:
        """Whether it can attend for this layer."""


class MlxAttention(AttentionBackend):
    """The backends ``gather`` and, with a kernel for decode steps, ``metal``."""

    def __init__(self, pool: MlxKVPool, name: str = "gather", kernel: PagedDecode | None = None) -> None:
        """Attend over a pool.

        Args:
            pool: keys, values and tables.
            name: what the backend is called.
            kernel: takes over the decode rows of the layers that it can do.
        """
        self.name = name
        self.pool = pool
        self.planner = Planner(pool, pool.layout)
        self._kernel = kernel

    def plan(self, meta: AttentionMeta) -> StepPlan:
        """See ``AttentionBackend.plan``."""
        return self.planner.plan(meta)

    def forward(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        layer: LayerKV,
        plan: StepPlan,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """See ``AttentionBackend.forward``."""
        if plan.tail_start is not None:
            self.pool.write_tail(layer, plan.tail_start, k, v)
        else:
            self.pool.write(layer, plan.out_slots[layer.group], k, v)
        kind = (layer.group, layer.window)
        parts = plan.decode.get(kind, ())
        if plan.token_groups is None:
            return self._decode(q, layer, parts[0], sinks)
        pieces = [
            self._decode(mx.take(q, tokens, axis=0), layer, part, sinks)
            for tokens, part in zip(plan.token_groups, parts, strict=True)
        ]
        pieces += [self._extend(q, layer, row, sinks) for row in plan.extend.get(kind, ())]
        out = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=0)
        return out if plan.order is None else mx.take(out, plan.order, axis=0)

    def _decode(self, q: mx.array, layer: LayerKV, part: DecodePart, sinks: mx.array | None) -> mx.array:
        # decode steps always write to the tail; single tokens of other steps find nothing there
        if self._kernel is not None and part.places.shape[1] and self._kernel.takes(layer, sinks):
            return self._kernel(q, self.pool, layer, part)
        keys, values = (
            self._gather(pool[layer.index], tail[layer.index], part, q.dtype)
            for pool, tail in (
                (self.pool.keys, self.pool.tail_keys),
                (self.pool.values, self.pool.tail_values),
            )
        )
        out = _attend(q[:, :, None], keys, values, layer, (part.mask, sinks))
        return out.reshape(q.shape[0], layer.q_heads * layer.v_dim)

    def _gather(self, pool: mx.array, tail: mx.array, part: DecodePart, dtype: mx.Dtype) -> mx.array:
        """``[rows, kv_heads, width + tail width, dim]``."""
        found = mx.take(pool, part.slots, axis=0)
        if part.places.shape[1]:
            found = mx.concatenate([found, mx.take(tail, part.places, axis=0)], axis=1)
        return found.astype(dtype).transpose(0, 2, 1, 3)

    def _extend(self, q: mx.array, layer: LayerKV, row: ExtendRow, sinks: mx.array | None) -> mx.array:
        keys, values = (
            mx.take(pool[layer.index], row.slots, axis=0).astype(q.dtype).transpose(1, 0, 2)[None]
            for pool in (self.pool.keys, self.pool.values)
        )
        pieces = []
        for block in row.blocks:
            queries = q[block.start : block.stop].transpose(1, 0, 2)[None]
            seen = slice(block.first_key, block.last_key)
            mask: mx.array | str = "causal" if block.mask is None else block.mask
            if block.mask is None and layer.softcap is not None:
                mask = _causal(block)
            out = _attend(queries, keys[:, :, seen], values[:, :, seen], layer, (mask, sinks))
            pieces.append(out[0].transpose(1, 0, 2).reshape(block.stop - block.start, -1))
            if len(row.blocks) > 1:
                _bound_blocks(pieces)
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=0)


def _bound_blocks(pieces: list[mx.array]) -> None:
    """Start the newest block and wait for the one before, so that no more than two hold their scores."""
    start(pieces[-1])
    if len(pieces) > 1:
        mx.eval(pieces[-2])


def _causal(block: ExtendBlock) -> mx.array:
    """Bool ``[queries, keys]``; the last query is the last key's."""
    queries, keys = block.stop - block.start, block.last_key - block.first_key
    return mx.arange(keys - queries, keys)[:, None] >= mx.arange(keys)


def _attend(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    layer: LayerKV,
    mask_and_sinks: tuple[mx.array | str | None, mx.array | None],
) -> mx.array:
    """Attention of ``q: [rows, q_heads, n, k_dim]`` over ``[rows, kv_heads, keys, dim]``.

    ``mask`` is bool, broadcast to ``[rows, 1, n, keys]``. With a soft-cap, scores are written out in float32.

    Source: Gemma Team, "Gemma 2", section 2 (soft-cap); Xiao et al., "Efficient Streaming Language Models with
    Attention Sinks", section 3.
    """
    mask, sinks = mask_and_sinks
    if layer.softcap is None:
        sinks = None if sinks is None else sinks.astype(q.dtype)
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=layer.scale, mask=mask, sinks=sinks)
    rows, heads, count, _ = q.shape
    shared = layer.q_heads // layer.kv_heads
    stacked = q.reshape(rows, layer.kv_heads, shared * count, layer.k_dim).astype(mx.float32)
    scores = (stacked @ keys.astype(mx.float32).swapaxes(-1, -2)) * layer.scale
    scores = layer.softcap * mx.tanh(scores / layer.softcap)
    scores = scores.reshape(rows, heads, count, -1)
    if isinstance(mask, mx.array):
        scores = mx.where(mask, scores, -mx.inf)
    if sinks is not None:
        column = mx.broadcast_to(sinks.astype(mx.float32)[:, None, None], (rows, heads, count, 1))
        weights = mx.softmax(mx.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
    else:
        weights = mx.softmax(scores, axis=-1)
    weights = weights.reshape(rows, layer.kv_heads, shared * count, -1)
    out = weights @ values.astype(mx.float32)
    return out.reshape(rows, heads, count, layer.v_dim).astype(q.dtype)
