"""Attention by ``npu_fused_infer_attention_score`` over pages, and by torch's operators where that call has limits.

It knows no model and no scheduler. Which limits those are, and that a layer meets one, ``cardan_npu.limits`` says.

Source: op-plugin, docs/context/torch_npu-npu_fused_infer_attention_score.md: layout TND with page attention for steps
of several queries, and layout BSND for one query a row of layers with a window, where sparse modes have no effect.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch_npu

from cardan.errors import UnsupportedError
from cardan.platform import AttentionBackend, AttentionMeta
from cardan.types import KVLayout, LayerKV
from cardan_npu.attention_plan import EagerPlan, Rows
from cardan_npu.fixed_plan import FixedPlan
from cardan_npu.kv_pool import NpuKVPool
from cardan_npu.limits import MOST_ELEMENTS, why_not_fused
from cardan_torch import TorchAttention

Plan: TypeAlias = EagerPlan | FixedPlan

FUSED = "fused"
BY_TORCH = "torch"
BACKENDS = (FUSED, BY_TORCH)

MASK_SIDE = 2048
"""Compressed masks of sparse modes 3 and 4 have this size, whatever the lengths."""
LEFT, RIGHT_DOWN, BAND = 0, 3, 4
ALL_TOKENS = 2147483647


class WideTorchAttention(TorchAttention):
    """torch's attention with queries, keys and values widened to float32, so that its parts round nothing."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerKV,
        plan: Any,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        return super().forward(q.float(), k, v, layer, plan, sinks).to(q.dtype)


class NpuAttention(AttentionBackend):
    """The backends ``fused`` and ``torch`` of NPUs.

    Attributes:
        fused: which layers the fused call takes.
    """

    def __init__(self, name: str, pool: NpuKVPool, layout: KVLayout, dtype: str) -> None:
        """Make a backend; under the name ``torch`` no layer goes to the fused call."""
        self.name = name
        self.pool = pool
        self.layers = layout.layers
        self.fused = tuple(
            name == FUSED and why_not_fused(layer, layout.dtype, dtype) is None for layer in layout.layers
        )
        self._check_size()
        self._by_torch = WideTorchAttention(pool)
        above = torch.ones((MASK_SIDE, MASK_SIDE), dtype=torch.bool).triu(1)
        self._triangle = above.to(pool.tables.device)

    def _check_size(self) -> None:
        """Refuse a pool that the fused call does not take.

        Raises:
            UnsupportedError: a layer's keys have more elements than it counts.
        """
        widest = max(
            (x.kv_heads * x.k_dim for x, taken in zip(self.layers, self.fused, strict=True) if taken), default=0
        )
        if self.pool.num_slots * widest > MOST_ELEMENTS:
            page = self.pool.page_size
            most = (MOST_ELEMENTS // widest // page - 1) * page
            raise UnsupportedError(
                f"A pool of {self.pool.num_slots - page} tokens has {self.pool.num_slots * widest} numbers in a "
                f"layer's keys, and npu_fused_infer_attention_score takes at most {MOST_ELEMENTS}. "
                f"Pass --max-total-tokens {most} or less, or --attention-backend {BY_TORCH}."
            )

    def plan(self, meta: AttentionMeta) -> EagerPlan:
        """Integers of the step; tables and masks follow when the first layer of a kind asks."""
        return EagerPlan.of(self.pool, meta)

    def fixed_plan(self, rows: int, width: int) -> FixedPlan:
        """A plan of ``rows`` decode rows over memory that stays; layers by torch gather ``width`` keys a row."""
        return FixedPlan(self.pool, self.layers, self.fused, rows, width)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerKV,
        plan: Plan,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        if not self.fused[layer.index] or sinks is not None:
            return self._by_torch.forward(q, k, v, layer, plan.torch_plan(), sinks)
        self._write(k, v, layer, plan)
        rows, ends = plan.rows((layer.group, layer.window)), plan.query_ends
        if len(rows.parts) == 1:
            return self._fused(q, layer, rows, ends, plan.single)
        outs = []
        for part in rows.parts:
            first = ends[part.start - 1] if part.start else 0
            theirs = [end - first for end in ends[part]]
            queries = q[first : first + theirs[-1]]
            outs.append(self._fused(queries, layer, rows.of_part(part), theirs, plan.single))
        return torch.cat(outs)

    def _fused(self, q: torch.Tensor, layer: LayerKV, rows: Rows, ends: list[int], single: bool) -> torch.Tensor:
        """One call of the fused operator, for rows whose queries end at ``ends``."""
        if single and layer.window is not None:
            return self._decode_window(q, layer, rows)
        return self._by_tokens(q, layer, rows, ends, single)

    def _write(self, k: torch.Tensor, v: torch.Tensor, layer: LayerKV, plan: Plan) -> None:
        slots = plan.out_slots[layer.group]
        for cache, new in zip(self.pool.flat(layer.index), (k, v), strict=True):
            torch_npu.npu_scatter_nd_update_(cache, slots, new.flatten(1).to(cache.dtype))

    def _by_tokens(self, q: torch.Tensor, layer: LayerKV, rows: Rows, ends: list[int], single: bool) -> torch.Tensor:
        """Layout TND: rows of any numbers of queries, one after the other."""
        mode, back = LEFT, ALL_TOKENS
        if not single:
            mode, back = _sparse_mode(layer, rows.lengths, ends)
        out = self._call(
            q.contiguous(),
            layer,
            rows,
            input_layout="TND",
            actual_seq_lengths=ends,
            sparse_mode=mode,
            pre_tokens=back,
            next_tokens=0 if mode == BAND else ALL_TOKENS,
            atten_mask=None if mode == LEFT else self._triangle,
        )
        return out.flatten(1)

    def _decode_window(self, q: torch.Tensor, layer: LayerKV, rows: Rows) -> torch.Tensor:
        """Layout BSND of one query a row, over the window's pages and with what is older hidden."""
        queries = q.contiguous()[:, None]
        return self._call(queries, layer, rows, input_layout="BSND", atten_mask=rows.mask).flatten(1)

    def _call(self, q: torch.Tensor, layer: LayerKV, rows: Rows, **how: Any) -> torch.Tensor:
        keys, values = self._pages(layer, rows)
        out: torch.Tensor = torch_npu.npu_fused_infer_attention_score(
            q,
            keys,
            values,
            actual_seq_lengths_kv=list(rows.lengths),
            block_table=rows.blocks,
            num_heads=layer.q_heads,
            num_key_value_heads=layer.kv_heads,
            scale=layer.scale,
            block_size=self.pool.page_size,
            **how,
        )[0]
        return out

    def _pages(self, layer: LayerKV, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's pages; the only page of a dry run as often as its rows have pages, since the call wants so many."""
        keys, values = self.pool.paged(layer.index)
        if self.pool.num_pages > 1:
            return keys, values
        count = sum(-(-length // self.pool.page_size) for length in rows.lengths)
        return keys.repeat(count, 1, 1), values.repeat(count, 1, 1)


def _sparse_mode(layer: LayerKV, lengths: list[int], ends: list[int]) -> tuple[int, int]:
    """How causal order is said, and how many keys before its own a query sees.

    Mode 3 needs less queries than keys in every row; a band without an end says the same for any rows.
    """
    if layer.window is not None:
        return BAND, layer.window - 1
    counts = [end - start for start, end in zip((0, *ends), ends, strict=False)]
    shorter = all(count < length for count, length in zip(counts, lengths, strict=True))
    return (RIGHT_DOWN, ALL_TOKENS) if shorter else (BAND, ALL_TOKENS)
