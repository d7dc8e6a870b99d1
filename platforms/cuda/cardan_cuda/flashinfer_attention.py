"""The attention backend ``flashinfer``: its paged wrappers, planned once a step for each kind of layer.

It knows no model and no scheduler.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cardan.platform import AttentionMeta
from cardan.types import ForwardMode, Int32Array, KVLayout, LayerKV
from cardan_cuda.flashinfer_limits import FLASHINFER, on_tensor_cores
from cardan_torch import LibraryAttention, LibraryPlan
from cardan_torch.gpu.accelerator import Accelerator
from cardan_torch.gpu.kv_pool import GpuKVPool
from cardan_torch.gpu.page_lists import PageLists
from cardan_torch.gpu.triton_attention import TritonAttention, TritonPlan
from cardan_torch.tensors import torch_dtype

WORKSPACE_BYTES = 256 * 2**20
"""For parts of split rows; shared by all wrappers, of which one runs at a time."""

STEPS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What a wrapper is planned for; layers that agree in it share one."""

    group: int
    q_heads: int
    kv_heads: int
    dim: int
    scale: float
    window: int | None
    softcap: float | None

    @classmethod
    def of(cls, layer: LayerKV) -> LayerKind:
        """The kind of a layer."""
        return cls(layer.group, layer.q_heads, layer.kv_heads, layer.k_dim, layer.scale, layer.window, layer.softcap)


@dataclass(slots=True)
class FlashInferPlan(LibraryPlan):
    """A step.

    Attributes:
        wrappers: planned, by kind of layer.
    """

    wrappers: dict[LayerKind, Any] = field(default_factory=dict)


class FlashInferAttention(LibraryAttention[FlashInferPlan]):
    """Attention by FlashInfer."""

    name = FLASHINFER.name
    limits = FLASHINFER

    def __init__(
        self, accelerator: Accelerator, pool: GpuKVPool, layout: KVLayout, dtype: str, triton: TritonAttention
    ) -> None:
        """See ``LibraryAttention``."""
        super().__init__(accelerator, pool, layout, dtype, triton)
        self._kv_dtype = layout.dtype
        self._dtype = torch_dtype(dtype)
        self._kinds = {LayerKind.of(layer): layer for layer in self.taken}
        self._spares: dict[tuple[LayerKind, bool], deque[Any]] = {}
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=accelerator.device)

    def _plan(self, triton: TritonPlan, meta: AttentionMeta) -> FlashInferPlan:
        """Plan a wrapper for each kind of layer; decode steps take the decode wrapper, all others prefill's."""
        plan = FlashInferPlan(triton)
        decode = meta.mode is ForwardMode.DECODE
        pages = self._pages_by_group(triton, meta.seq_lens)
        for kind, layer in self._kinds.items():
            wrapper = self._spare(kind, layer, decode=decode)
            self._plan_wrapper(wrapper, kind, pages[kind.group], None if decode else meta.query_starts)
            plan.wrappers[kind] = wrapper
        return plan

    def _reserve(self, triton: TritonPlan) -> FlashInferPlan:
        """Wrappers over memory that stays."""
        rows = triton.arrays.num_rows
        most = rows * -(-self.pool.max_length // self.pool.page_size)
        device = self._accelerator.device
        indices = {group: self._lists[group].take(most) for group in self.groups}
        plan = FlashInferPlan(triton)
        for kind, layer in self._kinds.items():
            starts = torch.zeros(rows + 1, dtype=torch.int32, device=device)
            last = torch.ones(rows, dtype=torch.int32, device=device)
            plan.wrappers[kind] = self._decode_wrapper(layer, (starts, indices[kind.group], last))
        return plan

    def _refill(self, plan: FlashInferPlan, lengths: Int32Array) -> None:
        pages = self._pages_by_group(plan.triton, lengths)
        for kind, wrapper in plan.wrappers.items():
            self._plan_wrapper(wrapper, kind, pages[kind.group], None)

    def _attend(self, q: torch.Tensor, layer: LayerKV, plan: FlashInferPlan) -> torch.Tensor:
        scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale} if self._kv_dtype.startswith("fp8") else {}
        out: torch.Tensor = plan.wrappers[LayerKind.of(layer)].run(q, self.pool.pages(layer), **scales)
        return out

    def _spare(self, kind: LayerKind, layer: LayerKV, *, decode: bool) -> Any:
        """A wrapper whose last plan no step in flight reads: two take turns, since each takes memory to be made."""
        spares = self._spares.setdefault((kind, decode), deque())
        if len(spares) < STEPS_IN_FLIGHT:
            spares.append(self._decode_wrapper(layer) if decode else self._prefill_wrapper())
        else:
            spares.rotate(-1)
        return spares[-1]

    def _decode_wrapper(self, layer: LayerKV, buffers: tuple[torch.Tensor, ...] | None = None) -> Any:
        fixed: dict[str, Any] = {}
        if buffers is not None:
            names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
            fixed = {"use_cuda_graph": True, **dict(zip(names, buffers, strict=True))}
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=on_tensor_cores(layer, self._kv_dtype), **fixed
        )

    def _prefill_wrapper(self) -> Any:
        return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")

    def _plan_wrapper(self, wrapper: Any, kind: LayerKind, pages: PageLists, query_starts: Int32Array | None) -> None:
        starts, last = torch.from_numpy(pages.starts), torch.from_numpy(pages.last)
        first: tuple[Any, ...] = (starts, pages.indices, last)
        more: dict[str, Any] = {}
        if query_starts is not None:
            first = (torch.from_numpy(query_starts.astype(np.int32)), *first)
            more["causal"] = True
        wrapper.plan(
            *first,
            kind.q_heads,
            kind.kv_heads,
            kind.dim,
            self.pool.page_size,
            window_left=-1 if kind.window is None else kind.window - 1,
            logits_soft_cap=kind.softcap,
            q_data_type=self._dtype,
            kv_data_type=self.pool.keys[0].dtype,
            sm_scale=kind.scale,
            **more,
        )

    def _pages_by_group(self, triton: TritonPlan, lengths: Int32Array) -> dict[int, PageLists]:
        return {group: self._pages(triton, group, lengths, self.pool.page_size) for group in self.groups}
