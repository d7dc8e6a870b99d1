"""The attention backend ``triton``: paged prefill and split decode, planned once a step, replayed over fixed arrays.

It knows no model and no scheduler. Rows with one new token go through the decode kernel, the others through prefill's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from cardan.platform import AttentionBackend, AttentionMeta
from cardan.types import ForwardMode, LayerKV
from cardan_kernels import attention, rope
from cardan_kernels.attention import shape
from cardan_kernels.chips import chip_of
from cardan_kernels.paged import PagedKV
from cardan_torch.gpu.accelerator import Accelerator
from cardan_torch.gpu.kv_pool import GpuKVPool
from cardan_torch.gpu.ops import Rotated
from cardan_torch.gpu.page_lists import no_rows
from cardan_torch.gpu.reserve import Reserve
from cardan_torch.gpu.step_arrays import StepArrays


@dataclass(slots=True)
class TritonPlan:
    """A step's rows; what layers of one shape share is added when the first of them asks.

    Attributes:
        arrays: the step's integers on the device.
        longest: no row has more keys; under a graph what the pool allows.
        meta: the step, where it has rows of several tokens; None for decode steps.
        decode: rows of one token, for the decode kernel; None where there are none.
        scratch: parts of split rows, float32; layers share it, and so do all fixed plans.
        tiles: of the rows with several tokens, by how many tokens a tile holds.
    """

    arrays: StepArrays
    longest: int
    meta: AttentionMeta | None
    decode: attention.DecodeRows | None
    scratch: Reserve
    tiles: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def positions(self) -> torch.Tensor:
        """int32 ``[tokens]``."""
        return self.arrays.positions


class TritonAttention(AttentionBackend):
    """Attention in Triton kernels: any head size they know, windows, soft-caps, sinks, keys of 8 bits."""

    name = "triton"

    def __init__(self, accelerator: Accelerator, pool: GpuKVPool, *, deterministic: bool = False) -> None:
        """Bind a backend.

        Args:
            accelerator: where it runs.
            pool: whose keys and values it reads and writes.
            deterministic: whether a row's result must not depend on its batch, bit for bit; keys are then split at
                fixed places.
        """
        self._accelerator = accelerator
        self._deterministic = deterministic
        self._chip = chip_of(accelerator.device)
        self._fixed_scratch = self._new_scratch()
        self.pool = pool

    def plan(self, meta: AttentionMeta) -> TritonPlan:
        """Bring the step's integers to the device."""
        arrays = StepArrays.of(self._accelerator, meta)
        counts = np.diff(meta.query_starts)
        single = np.flatnonzero(counts == 1)
        if meta.mode is ForwardMode.DECODE or len(single) == len(counts):
            return TritonPlan(arrays, int(meta.seq_lens.max(initial=1)), None, _all_rows(arrays), self._new_scratch())
        if len(single) == 0:
            return TritonPlan(arrays, 1, meta, None, self._new_scratch())
        packed = np.stack((meta.seq_lens[single], meta.row_ids[single], meta.query_starts[:-1][single]))
        lengths, table_rows, tokens = self._accelerator.upload(packed.astype(np.int32))
        rows = attention.DecodeRows(lengths, table_rows, tokens)
        return TritonPlan(arrays, int(meta.seq_lens[single].max()), meta, rows, self._new_scratch())

    def fixed_plan(self, rows: int) -> TritonPlan:
        """See ``ReplayedAttention.fixed_plan``."""
        arrays = StepArrays(self._accelerator, rows, rows, self.pool.num_groups)
        arrays.fill(no_rows(self.pool.num_groups))
        return TritonPlan(arrays, self.pool.max_length, None, _all_rows(arrays), self._fixed_scratch)

    def refill(self, plan: TritonPlan, meta: AttentionMeta) -> None:
        """See ``ReplayedAttention.refill``."""
        plan.arrays.fill(meta)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerKV,
        plan: TritonPlan,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        return self._attend(q, self.write(k, v, layer, plan), layer, plan, sinks)

    def forward_rotating(
        self,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: Rotated,
        layer: LayerKV,
        plan: TritonPlan,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``RotatingAttention.forward_rotating``."""
        q, kv = self.rotate_and_write(qkv, rotation, layer, plan)
        return self._attend(q, kv, layer, plan, sinks)

    def write(self, k: torch.Tensor, v: torch.Tensor, layer: LayerKV, plan: TritonPlan) -> PagedKV:
        """Write a layer's new keys and values to their slots; returns where all of them stand."""
        kv = self._kv(layer)
        rope.write_kv(k, v, kv, plan.arrays.out_slots[layer.group])
        return kv

    def rotate_and_write(
        self,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: Rotated,
        layer: LayerKV,
        plan: TritonPlan,
    ) -> tuple[torch.Tensor, PagedKV]:
        """The same by one kernel that rotates queries and keys first; returns the rotated queries too."""
        kv = self._kv(layer)
        slots = plan.arrays.out_slots[layer.group]
        return rope.rope_and_write_kv(qkv, rotation.positions, rotation.rotation, kv, slots), kv

    def _attend(
        self, q: torch.Tensor, kv: PagedKV, layer: LayerKV, plan: TritonPlan, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        scoring = attention.Scoring(layer.scale, layer.window, layer.softcap, sinks)
        out = q.new_empty((q.shape[0], layer.q_heads * layer.v_dim))
        if plan.meta is not None:
            attention.prefill(q, kv, self._tiles(plan, plan.meta, q, layer), scoring, out)
        if plan.decode is not None:
            attention.decode(q, kv, plan.decode, scoring, self._split(plan, plan.decode, q, layer), out)
        return out

    def _kv(self, layer: LayerKV) -> PagedKV:
        """Where a layer's keys and values stand."""
        return PagedKV(
            keys=self.pool.keys[layer.index],
            values=self.pool.values[layer.index],
            table=self.pool.tables[layer.group],
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
        )

    def _shape(self, q: torch.Tensor, layer: LayerKV) -> shape.AttentionShape:
        return shape.AttentionShape(
            layer.q_heads, layer.kv_heads, layer.k_dim, layer.v_dim, q.dtype, self.pool.keys[layer.index].dtype
        )

    def _split(
        self, plan: TritonPlan, rows: attention.DecodeRows, q: torch.Tensor, layer: LayerKV
    ) -> attention.DecodeSplits:
        count, longest = rows.lengths.shape[0], plan.longest
        if self._deterministic:
            splits = attention.fixed_splits(longest)
        else:
            seen = longest if layer.window is None else min(longest, layer.window)
            programs = shape.head_tiles(self._shape(q, layer), self._chip)
            splits = attention.choose_splits(count, programs, seen, self._accelerator.chip.units)
        size = attention.scratch_size(count, layer.q_heads, layer.v_dim, splits)
        return attention.DecodeSplits(splits, plan.scratch.take(size))

    def _new_scratch(self) -> Reserve:
        return Reserve(self._accelerator.device, torch.float32)

    def _tiles(self, plan: TritonPlan, meta: AttentionMeta, q: torch.Tensor, layer: LayerKV) -> torch.Tensor:
        tokens = shape.tokens_per_tile(self._shape(q, layer), self._chip)
        if tokens not in plan.tiles:
            tiles = attention.plan_tiles(meta.query_starts, meta.seq_lens, meta.row_ids, tokens)
            singles = meta.query_starts[:-1][np.diff(meta.query_starts) == 1]
            plan.tiles[tokens] = self._accelerator.upload(tiles[~np.isin(tiles[:, 0], singles)])
        return plan.tiles[tokens]


def _all_rows(arrays: StepArrays) -> attention.DecodeRows:
    return attention.DecodeRows(arrays.seq_lens, arrays.row_ids)
