"""The attention backend ``aiter``: AITER's paged attention for decode, its paged batch prefill for all other steps.

It knows no model and no scheduler. Slots count as pages of one token. Layers that AITER does not take go through the
Triton kernels.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cardan.platform import AttentionBackend, AttentionMeta
from cardan.types import ForwardMode, Int32Array, KVLayout, LayerKV
from cardan_rocm.aiter_limits import DTYPES, why_not_layer
from cardan_torch.gpu.accelerator import Accelerator
from cardan_torch.gpu.kv_pool import GpuKVPool
from cardan_torch.gpu.page_lists import PageLists, list_pages, no_rows, padded_lengths
from cardan_torch.gpu.triton_attention import TritonAttention, TritonPlan

PARTITION = 256
"""Keys of a part of a row in its decode kernel."""


@dataclass(slots=True)
class AiterGroup:
    """The rows of a step in one KV group, on the device.

    Attributes:
        starts: int32 ``[rows + 1]``, first slot of each row in ``slots``.
        slots: int32.
        last: int32 ``[rows]``, ones: tokens in each row's last page.
    """

    starts: torch.Tensor
    slots: torch.Tensor
    last: torch.Tensor


@dataclass(slots=True)
class AiterPlan:
    """A step.

    Attributes:
        triton: the same step for the Triton kernels, and its integers on the device.
        longest: no row has more keys; under a graph what the pool allows.
        most_queries: most new tokens of a row.
        groups: by KV group.
        scratch: parts of rows, by their size in bytes.
    """

    triton: TritonPlan
    longest: int
    most_queries: int
    groups: dict[int, AiterGroup] = field(default_factory=dict)
    scratch: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def positions(self) -> torch.Tensor:
        """int32 ``[tokens]``."""
        return self.triton.positions


class AiterAttention(AttentionBackend):
    """Attention by AITER."""

    name = "aiter"

    def __init__(
        self, accelerator: Accelerator, pool: GpuKVPool, layout: KVLayout, dtype: str, triton: TritonAttention
    ) -> None:
        """Bind a backend.

        Args:
            accelerator: where it runs.
            pool: whose keys and values it reads.
            layout: of the pool.
            dtype: of the activations.
            triton: attends for layers that AITER does not take.
        """
        library = importlib.import_module("aiter")
        self.pool = pool
        self._library: Any = library
        self._accelerator = accelerator
        self._triton = triton
        takes = dtype in DTYPES and layout.dtype == dtype
        self._taken = {layer.index for layer in layout.layers if takes and why_not_layer(layer) is None}
        self._groups = {layer.group for layer in layout.layers if layer.index in self._taken}
        self._one = torch.ones(1, dtype=torch.float32, device=accelerator.device)

    @property
    def layers(self) -> frozenset[int]:
        """Layers that AITER takes."""
        return frozenset(self._taken)

    def plan(self, meta: AttentionMeta) -> AiterPlan:
        """Look the step's slots up."""
        counts = np.diff(meta.query_starts)
        plan = AiterPlan(self._triton.plan(meta), int(meta.seq_lens.max(initial=1)), int(counts.max(initial=1)))
        if meta.mode is ForwardMode.DECODE:
            plan.most_queries = 1
        for group in self._groups:
            found = self._slots(plan.triton, group, meta.seq_lens)
            starts = self._accelerator.upload(found.starts)
            last = self._accelerator.upload(found.last)
            plan.groups[group] = AiterGroup(starts, found.indices, last)
        return plan

    def fixed_plan(self, rows: int) -> AiterPlan:
        """See ``ReplayedAttention.fixed_plan``."""
        device = self._accelerator.device
        plan = AiterPlan(self._triton.fixed_plan(rows), self.pool.max_length, 1)
        for group in self._groups:
            slots = torch.zeros(rows * self.pool.max_length, dtype=torch.int32, device=device)
            starts = torch.zeros(rows + 1, dtype=torch.int32, device=device)
            plan.groups[group] = AiterGroup(starts, slots, torch.ones(rows, dtype=torch.int32, device=device))
        self.refill(plan, no_rows(self.pool.num_groups))
        return plan

    def refill(self, plan: AiterPlan, meta: AttentionMeta) -> None:
        """See ``ReplayedAttention.refill``."""
        self._triton.refill(plan.triton, meta)
        lengths = padded_lengths(meta, plan.triton.arrays.num_rows)
        for group, fixed in plan.groups.items():
            found = self._slots(plan.triton, group, lengths)
            self._accelerator.upload(found.starts, out=fixed.starts)
            fixed.slots[: len(found.indices)].copy_(found.indices)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerKV,
        plan: AiterPlan,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        if layer.index not in self._taken or sinks is not None:
            return self._triton.forward(q, k, v, layer, plan.triton, sinks)
        self._triton.write(k, v, layer, plan.triton)
        attend = self._decode if plan.most_queries == 1 else self._prefill
        return attend(q.contiguous(), layer, plan).reshape(q.shape[0], layer.q_heads * layer.v_dim)

    def _decode(self, q: torch.Tensor, layer: LayerKV, plan: AiterPlan) -> torch.Tensor:
        rows, found = q.shape[0], plan.groups[layer.group]
        parts = -(-plan.longest // PARTITION)
        size = 4 * rows * layer.q_heads * parts * (layer.v_dim + 2)
        if size not in plan.scratch:
            plan.scratch[size] = torch.empty(size, dtype=torch.uint8, device=q.device)
        out = torch.empty_like(q)
        keys, values = self.pool.keys[layer.index], self.pool.values[layer.index]
        self._library.paged_attention_ragged(
            out,
            plan.scratch[size],
            q,
            keys.view(-1, 1, layer.kv_heads, layer.k_dim),
            values.view(-1, 1, layer.kv_heads, layer.v_dim),
            layer.scale,
            found.starts,
            found.slots,
            found.last,
            1,
            parts,
            None,
            "auto",
            "NHD",
            layer.softcap or 0.0,
            self._one,
            self._one,
            None,
            PARTITION,
        )
        return out

    def _prefill(self, q: torch.Tensor, layer: LayerKV, plan: AiterPlan) -> torch.Tensor:
        found = plan.groups[layer.group]
        out: torch.Tensor = self._library.mha_batch_prefill_func(
            q,
            self.pool.keys[layer.index],
            self.pool.values[layer.index],
            plan.triton.arrays.query_starts,
            found.starts,
            found.slots,
            plan.most_queries,
            plan.longest,
            softmax_scale=layer.scale,
            logits_soft_cap=layer.softcap or 0.0,
            causal=True,
        )
        return out

    def _slots(self, plan: TritonPlan, group: int, lengths: Int32Array) -> PageLists:
        return list_pages(self._accelerator, self.pool, group, (plan.arrays.row_ids, lengths), 1)
