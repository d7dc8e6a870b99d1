"""Attention over slots in plain torch: keys and values are gathered by slot, then attended to in few calls.

It knows no model and no scheduler. Layers without soft-cap or sinks go through torch's fused attention, which keeps
no score matrix; the others materialise scores in float32, a bounded block of queries at a time.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional

from cardan.platform import AttentionBackend, AttentionMeta
from cardan.types import LayerKV
from cardan_torch.attention_plan import DecodeGroup, ExtendBlock, ExtendRow, StepPlan, plan_step
from cardan_torch.kv_pool import TorchKVPool


class TorchAttention(AttentionBackend):
    """The attention backend ``torch``: any torch device, any page size, prefill and decode."""

    name = "torch"

    def __init__(self, pool: TorchKVPool) -> None:
        self.pool = pool

    def plan(self, meta: AttentionMeta) -> StepPlan:
        """Sort the rows; slots and masks follow when the first layer of a kind asks."""
        return plan_step(meta, self.pool.tables)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerKV,
        plan: StepPlan,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        self.pool.write(k, v, layer, plan.out_slots[layer.group])
        if not self.pool.is_float8:
            return self._attend_kept(q, layer, plan, sinks)
        out = self._attend_kept(q, replace(layer, scale=layer.scale * layer.k_scale), plan, sinks)
        return out if layer.v_scale == 1.0 else out.mul_(layer.v_scale)

    def _attend_kept(self, q: torch.Tensor, layer: LayerKV, plan: StepPlan, sinks: torch.Tensor | None) -> torch.Tensor:
        """Attend to what the pool keeps, as it is kept."""
        materialise = layer.softcap is not None or sinks is not None
        parts = plan.for_layer(layer.group, layer.window, layer.q_heads if materialise else 0)
        only = parts.decode[0] if len(parts.decode) == 1 else None
        if only is not None and only.tokens is None:
            return self._decode(q, layer, only, sinks)
        out = q.new_empty((q.shape[0], layer.q_heads * layer.v_dim))
        for group in parts.decode:
            if group.tokens is not None:
                out.index_copy_(0, group.tokens, self._decode(q.index_select(0, group.tokens), layer, group, sinks))
        for row in parts.extend:
            self._extend(q, layer, row, sinks, out)
        return out

    def _decode(self, q: torch.Tensor, layer: LayerKV, group: DecodeGroup, sinks: torch.Tensor | None) -> torch.Tensor:
        """One query a row. The query heads that share a key head stand as its queries, so no key is repeated."""
        rows = q.shape[0]
        keys, values = self.pool.gather(layer, group.slots, q.dtype)
        keys = keys.view(rows, group.width, layer.kv_heads, layer.k_dim).transpose(1, 2)
        values = values.view(rows, group.width, layer.kv_heads, layer.v_dim).transpose(1, 2)
        shared = layer.q_heads // layer.kv_heads
        queries = q.reshape(rows, layer.kv_heads, shared, layer.k_dim)
        if layer.softcap is None and sinks is None:
            mask = None if group.mask is None else group.mask.to(q.dtype)
            out = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=layer.scale)
        else:
            column = None if sinks is None else sinks.view(1, layer.kv_heads, shared, 1)
            out = _attend(queries, keys, values, layer, (group.mask, column))
        return out.reshape(rows, layer.q_heads * layer.v_dim)

    def _extend(
        self, q: torch.Tensor, layer: LayerKV, row: ExtendRow, sinks: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        keys, values = (x.transpose(0, 1)[None] for x in self.pool.gather(layer, row.slots, q.dtype))
        for block in row.blocks:
            queries = q[block.start : block.stop].transpose(0, 1)[None]
            seen = slice(block.first_key, block.last_key)
            if layer.softcap is None and sinks is None:
                part = functional.scaled_dot_product_attention(
                    queries,
                    keys[:, :, seen],
                    values[:, :, seen],
                    attn_mask=None if block.mask is None else block.mask.to(q.dtype)[None, None],
                    is_causal=block.mask is None,
                    scale=layer.scale,
                    enable_gqa=layer.q_heads != layer.kv_heads,
                )
            else:
                part = _extend_materialised(queries, (keys[:, :, seen], values[:, :, seen]), layer, block, sinks)
            out[block.start : block.stop] = part[0].transpose(0, 1).flatten(1)


def _extend_materialised(
    queries: torch.Tensor,
    keys_and_values: tuple[torch.Tensor, torch.Tensor],
    layer: LayerKV,
    block: ExtendBlock,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """``queries: [1, q_heads, n, k_dim]`` with scores written out; returns ``[1, q_heads, n, v_dim]``."""
    keys, values = keys_and_values
    count = queries.shape[2]
    shared = layer.q_heads // layer.kv_heads
    stacked = queries.reshape(1, layer.kv_heads, shared * count, layer.k_dim)
    mask = None if block.mask is None else block.mask.repeat(shared, 1)[None, None]
    column = None
    if sinks is not None:
        column = sinks.view(1, layer.kv_heads, shared, 1).repeat_interleave(count, dim=2)
    return _attend(stacked, keys, values, layer, (mask, column)).reshape(1, layer.q_heads, count, layer.v_dim)


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layer: LayerKV,
    mask_and_sinks: tuple[torch.Tensor | None, torch.Tensor | None],
) -> torch.Tensor:
    """Attention with scores in float32, for ``queries: [rows, kv_heads, n, k_dim]``.

    A sink is a score without a value: it takes its share of the softmax and adds nothing.

    Source: Gemma Team, "Gemma 2", section 2 (soft-cap); Xiao et al., "Efficient Streaming Language Models with
    Attention Sinks", section 3.
    """
    mask, column = mask_and_sinks
    scores = torch.matmul(queries.float(), keys.float().transpose(-1, -2)).mul_(layer.scale)
    if layer.softcap is not None:
        scores.div_(layer.softcap).tanh_().mul_(layer.softcap)
    if mask is not None:
        scores.add_(mask)
    if column is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        sink_scores = column.to(scores.dtype).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat((scores, sink_scores), dim=-1), dim=-1)[..., :-1]
    return torch.matmul(weights, values.float()).to(queries.dtype)
