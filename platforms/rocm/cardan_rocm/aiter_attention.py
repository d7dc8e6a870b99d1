"""The attention backend ``aiter``: AITER's paged attention for decode, its paged batch prefill for all other steps.

It knows no model and no scheduler. Slots count as pages of one token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from cardan.platform import AttentionMeta
from cardan.types import ForwardMode, Int32Array, KVLayout, LayerKV
from cardan_rocm.aiter_limits import AITER
from cardan_torch import LibraryAttention, LibraryPlan
from cardan_torch.gpu.accelerator import Accelerator
from cardan_torch.gpu.kv_pool import GpuKVPool
from cardan_torch.gpu.reserve import Reserve
from cardan_torch.gpu.triton_attention import TritonAttention, TritonPlan

PARTITION = 256
"""Keys of a part of a row in its decode kernel."""


@dataclass(frozen=True, slots=True)
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
class AiterPlan(LibraryPlan):
    """A step.

    Attributes:
        longest: no row has more keys; under a graph what the pool allows.
        most_queries: most new tokens of a row.
        groups: by KV group.
        scratch: parts of rows, bytes; layers share it, and so do all fixed plans.
    """

    longest: int
    most_queries: int
    scratch: Reserve
    groups: dict[int, AiterGroup] = field(default_factory=dict)


class AiterAttention(LibraryAttention[AiterPlan]):
    """Attention by AITER."""

    name = AITER.name
    limits = AITER

    def __init__(
        self, accelerator: Accelerator, pool: GpuKVPool, layout: KVLayout, dtype: str, triton: TritonAttention
    ) -> None:
        """See ``LibraryAttention``."""
        super().__init__(accelerator, pool, layout, dtype, triton)
        self._fixed_scratch = Reserve(accelerator.device, torch.uint8)
        self._one = torch.ones(1, dtype=torch.float32, device=accelerator.device)

    def _plan(self, triton: TritonPlan, meta: AttentionMeta) -> AiterPlan:
        """Look the step's slots up."""
        most = 1 if meta.mode is ForwardMode.DECODE else int(np.diff(meta.query_starts).max(initial=1))
        scratch = Reserve(self._accelerator.device, torch.uint8)
        plan = AiterPlan(triton, int(meta.seq_lens.max(initial=1)), most, scratch)
        for group in self.groups:
            found = self._pages(triton, group, meta.seq_lens, 1)
            starts, last = (self._accelerator.upload(array) for array in (found.starts, found.last))
            plan.groups[group] = AiterGroup(starts, found.indices, last)
        return plan

    def _reserve(self, triton: TritonPlan) -> AiterPlan:
        rows, device = triton.arrays.num_rows, self._accelerator.device
        plan = AiterPlan(triton, self.pool.max_length, 1, self._fixed_scratch)
        for group in self.groups:
            slots = self._lists[group].take(rows * self.pool.max_length)
            starts = torch.zeros(rows + 1, dtype=torch.int32, device=device)
            plan.groups[group] = AiterGroup(starts, slots, torch.ones(rows, dtype=torch.int32, device=device))
        return plan

    def _refill(self, plan: AiterPlan, lengths: Int32Array) -> None:
        for group, fixed in plan.groups.items():
            found = self._pages(plan.triton, group, lengths, 1)
            self._accelerator.upload(found.starts, out=fixed.starts)
            fixed.slots[: len(found.indices)].copy_(found.indices)

    def _attend(self, q: torch.Tensor, layer: LayerKV, plan: AiterPlan) -> torch.Tensor:
        return self._decode(q, layer, plan) if plan.most_queries == 1 else self._prefill(q, layer, plan)

    def _decode(self, q: torch.Tensor, layer: LayerKV, plan: AiterPlan) -> torch.Tensor:
        rows, found = q.shape[0], plan.groups[layer.group]
        parts = -(-plan.longest // PARTITION)
        size = 4 * rows * layer.q_heads * parts * (layer.v_dim + 2)
        out = torch.empty_like(q)
        keys, values = self.pool.keys[layer.index], self.pool.values[layer.index]
        self._library.paged_attention_ragged(
            out,
            plan.scratch.take(size),
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
