"""Attention by a library where it takes a layer, and by the Triton kernels where it does not.

It knows no library: a platform derives a backend that plans the library's calls and makes them. Keys and values are
written by Cardan's own kernel whoever attends.
"""

from __future__ import annotations

import abc
import importlib
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

from cardan.platform import AttentionBackend, AttentionMeta
from cardan.types import Int32Array, KVLayout, LayerKV
from cardan_torch.gpu.accelerator import Accelerator
from cardan_torch.gpu.kv_pool import GpuKVPool
from cardan_torch.gpu.library_limits import LibraryLimits
from cardan_torch.gpu.ops import Rotated
from cardan_torch.gpu.page_lists import PageLists, list_pages, no_rows, padded_lengths
from cardan_torch.gpu.reserve import Reserve
from cardan_torch.gpu.triton_attention import TritonAttention, TritonPlan


@dataclass(slots=True)
class LibraryPlan:
    """A step; a platform's plan adds what its library needs.

    Attributes:
        triton: the same step for the Triton kernels, and its integers on the device.
    """

    triton: TritonPlan

    @property
    def positions(self) -> torch.Tensor:
        """int32 ``[tokens]``."""
        return self.triton.positions


PlanT = TypeVar("PlanT", bound=LibraryPlan)


class LibraryAttention(AttentionBackend, Generic[PlanT]):
    """Attention by a library.

    Attributes:
        limits: what the library takes.
        pool: whose keys and values it reads.
        taken: layers that the library attends for.
    """

    limits: ClassVar[LibraryLimits]

    def __init__(
        self, accelerator: Accelerator, pool: GpuKVPool, layout: KVLayout, dtype: str, triton: TritonAttention
    ) -> None:
        """Bind a backend, and import the library.

        Args:
            accelerator: where it runs.
            pool: whose keys and values it reads.
            layout: of the pool.
            dtype: of the activations.
            triton: attends for layers that the library does not take.
        """
        self.pool = pool
        self.taken = tuple(layer for layer in layout.layers if self.limits.takes(layer, dtype, layout.dtype))
        self._library: Any = importlib.import_module(self.limits.name)
        self._accelerator = accelerator
        self._triton = triton
        self._indices = frozenset(layer.index for layer in self.taken)
        self._lists = {group: Reserve(accelerator.device, torch.int32) for group in self.groups}

    @property
    def groups(self) -> tuple[int, ...]:
        """KV groups that the library reads."""
        return tuple(dict.fromkeys(layer.group for layer in self.taken))

    def plan(self, meta: AttentionMeta) -> PlanT:
        """Plan the library's calls and the Triton kernels'."""
        return self._plan(self._triton.plan(meta), meta)

    def fixed_plan(self, rows: int) -> PlanT:
        """See ``ReplayedAttention.fixed_plan``."""
        plan = self._reserve(self._triton.fixed_plan(rows))
        self.refill(plan, no_rows(self.pool.num_groups))
        return plan

    def refill(self, plan: PlanT, meta: AttentionMeta) -> None:
        """See ``ReplayedAttention.refill``; calls are planned anew, outside what was captured."""
        self._triton.refill(plan.triton, meta)
        self._refill(plan, padded_lengths(meta, plan.triton.arrays.num_rows))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerKV,
        plan: PlanT,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        if not self._takes(layer, sinks):
            return self._triton.forward(q, k, v, layer, plan.triton, sinks)
        self._triton.write(k, v, layer, plan.triton)
        return self._attended(q, layer, plan)

    def forward_rotating(
        self,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: Rotated,
        layer: LayerKV,
        plan: PlanT,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``RotatingAttention.forward_rotating``."""
        if not self._takes(layer, sinks):
            return self._triton.forward_rotating(qkv, rotation, layer, plan.triton, sinks)
        q, _ = self._triton.rotate_and_write(qkv, rotation, layer, plan.triton)
        return self._attended(q, layer, plan)

    @abc.abstractmethod
    def _plan(self, triton: TritonPlan, meta: AttentionMeta) -> PlanT:
        """A step's own plan."""

    @abc.abstractmethod
    def _reserve(self, triton: TritonPlan) -> PlanT:
        """A plan of decode rows over memory that stays, of which pages stand in ``_lists``; ``_refill`` follows."""

    @abc.abstractmethod
    def _refill(self, plan: PlanT, lengths: Int32Array) -> None:
        """Bring rows of these lengths, int32 ``[rows]``, into a plan over memory that stays."""

    @abc.abstractmethod
    def _attend(self, q: torch.Tensor, layer: LayerKV, plan: PlanT) -> torch.Tensor:
        """The library's call with contiguous ``q: [tokens, q_heads, k_dim]``."""

    def _attended(self, q: torch.Tensor, layer: LayerKV, plan: PlanT) -> torch.Tensor:
        return self._attend(q.contiguous(), layer, plan).reshape(q.shape[0], layer.q_heads * layer.v_dim)

    def _takes(self, layer: LayerKV, sinks: torch.Tensor | None) -> bool:
        return sinks is None and layer.index in self._indices

    def _pages(self, plan: TritonPlan, group: int, lengths: Int32Array, page_size: int) -> PageLists:
        return list_pages(self._accelerator, self.pool, group, (plan.arrays.row_ids, lengths), page_size)
