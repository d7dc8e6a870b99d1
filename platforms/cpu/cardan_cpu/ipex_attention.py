"""Attention of decode steps by IPEX over slots: pages of one token, so that tables of slots are those of pages.

It knows no scheduler. Prompts go by torch, whose attention reads gathered keys at once, which pages of one token keep
IPEX from; and so do layers and pools that its kernel does not take.

Source: the docstring of ``intel_extension_for_pytorch.llm.modules.PagedAttention``, 2.8.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cardan.errors import UnsupportedError
from cardan.platform import AttentionMeta
from cardan.types import LayerKV
from cardan_cpu.ipex import IPEX, MODULE, why_not_ipex
from cardan_torch import TorchAttention, TorchKVPool
from cardan_torch.attention_plan import StepPlan, plan_step

NONE = -1
"""What IPEX takes for no window."""


@dataclass(slots=True)
class IpexPlan:
    """A step as IPEX takes it, with torch's own plan for the layers that it does not take.

    Attributes:
        step: torch's plan.
        single: every row has one query.
        lengths: int32 ``[rows]``.
        longest: of them.
        slots: for each group, int32 ``[rows, keys of the longest]``.
    """

    step: StepPlan
    single: bool
    lengths: torch.Tensor
    longest: int
    slots: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, meta: AttentionMeta, tables: torch.Tensor) -> IpexPlan:
        """The plan of a step."""
        single = bool((np.diff(meta.query_starts) == 1).all())
        lengths = torch.from_numpy(meta.seq_lens.astype(np.int32))
        return cls(plan_step(meta, tables), single, lengths, int(meta.seq_lens.max()))

    def slots_of(self, group: int) -> torch.Tensor:
        """Slots of every row's keys, in order; what stands behind a row's last is not read."""
        found = self.slots.get(group)
        if found is None:
            rows = torch.from_numpy(self.step.meta.row_ids.astype(np.int64))
            table = self.step.tables[group].index_select(0, rows)[:, : self.longest]
            found = self.slots[group] = table.to(torch.int32).contiguous()
        return found


class IpexAttention(TorchAttention):
    """The attention backend ``ipex``."""

    name = IPEX

    def __init__(self, pool: TorchKVPool) -> None:
        """Import IPEX.

        Raises:
            UnsupportedError: it is not installed, is of another release than torch, or breaks when imported.
        """
        super().__init__(pool)
        self._kernels = _import_kernels()
        self._heads: dict[tuple[int, int], torch.Tensor] = {}

    def plan(self, meta: AttentionMeta) -> IpexPlan:  # type: ignore[override]
        """Lengths of the rows; slots follow when the first layer of a group asks."""
        return IpexPlan.of(meta, self.pool.tables)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerKV,
        plan: IpexPlan,  # type: ignore[override]
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        if not plan.single or sinks is not None or not self._takes(layer, q.dtype):
            return super().forward(q, k, v, layer, plan.step, sinks)
        self.pool.write(k, v, layer, plan.step.out_slots[layer.group])
        q = q.contiguous()
        out = torch.empty_like(q)
        self._kernels.single_query_cached_kv_attention(
            out,
            q,
            self.pool.keys[layer.index].unsqueeze(2),  # [pages, heads, 1, dim]: pages of one token
            self.pool.values[layer.index].unsqueeze(2),
            self._heads_of(layer),
            layer.scale,
            plan.slots_of(layer.group),
            plan.lengths,
            1,
            plan.longest,
            None,
            window_size=NONE if layer.window is None else layer.window,
            softcap=float(NONE) if layer.softcap is None else layer.softcap,
        )
        return out.flatten(1)

    def _takes(self, layer: LayerKV, dtype: torch.dtype) -> bool:
        """Whether IPEX has a kernel for a layer.

        It takes one type for all and keys as wide as values; windows of one key it takes for none, and none beside a
        soft-cap.
        """
        windowed = layer.window is not None and (layer.window == 1 or layer.softcap is not None)
        return not windowed and layer.k_dim == layer.v_dim and self.pool.keys[layer.index].dtype is dtype

    def _heads_of(self, layer: LayerKV) -> torch.Tensor:
        """Which key head each query head reads: int32 ``[q_heads]``."""
        kind = layer.q_heads, layer.kv_heads
        if kind not in self._heads:
            shared = layer.q_heads // layer.kv_heads
            self._heads[kind] = torch.arange(layer.kv_heads, dtype=torch.int32).repeat_interleave(shared)
        return self._heads[kind]


def _import_kernels() -> Any:
    """IPEX's paged attention.

    Raises:
        UnsupportedError: see ``IpexAttention``.
    """
    lacking = why_not_ipex()
    if lacking is not None:
        raise UnsupportedError(f"Attention by IPEX cannot run: {lacking}. Pass --attention-backend torch.")
    try:
        return importlib.import_module(f"{MODULE}.llm.modules").PagedAttention
    except (ImportError, NameError, AttributeError, OSError) as error:
        raise UnsupportedError(
            f"Attention by IPEX cannot run: importing {MODULE} failed ({type(error).__name__}: {error}). It breaks "
            "beside releases of transformers that are newer than itself: uninstall transformers, or pass "
            "--attention-backend torch."
        ) from error
