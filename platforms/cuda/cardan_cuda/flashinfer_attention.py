"""The attention backend ``flashinfer``: its paged wrappers, planned once a step for each kind of layer.

It knows no model and no scheduler. Layers that FlashInfer does not take go through the Triton kernels.
"""

from __future__ import annotations

import importlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cardan.platform import AttentionBackend, AttentionMeta
from cardan.types import ForwardMode, Int32Array, KVLayout, LayerKV
from cardan_cuda.flashinfer_limits import DTYPES, KV_DTYPES, on_tensor_cores, why_not_layer
from cardan_torch.gpu.accelerator import Accelerator
from cardan_torch.gpu.kv_pool import GpuKVPool
from cardan_torch.gpu.page_lists import PageLists, list_pages, no_rows, padded_lengths
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
class FlashInferPlan:
    """A step.

    Attributes:
        triton: the same step for the Triton kernels, and its integers on the device.
        wrappers: planned, by kind of layer.
        indices: int32, fixed memory for the pages of all rows, by KV group; None for steps that are not replayed.
    """

    triton: TritonPlan
    wrappers: dict[LayerKind, Any] = field(default_factory=dict)
    indices: dict[int, torch.Tensor] | None = None

    @property
    def positions(self) -> torch.Tensor:
        """int32 ``[tokens]``."""
        return self.triton.positions


class FlashInferAttention(AttentionBackend):
    """Attention by FlashInfer."""

    name = "flashinfer"

    def __init__(
        self, accelerator: Accelerator, pool: GpuKVPool, layout: KVLayout, dtype: str, triton: TritonAttention
    ) -> None:
        """Bind a backend.

        Args:
            accelerator: where it runs.
            pool: whose keys and values it reads.
            layout: of the pool.
            dtype: of the activations.
            triton: attends for layers that FlashInfer does not take.
        """
        library = importlib.import_module("flashinfer")
        self.pool = pool
        self._library: Any = library
        self._accelerator = accelerator
        self._triton = triton
        self._kv_dtype = layout.dtype
        self._dtype = torch_dtype(dtype)
        takes = dtype in DTYPES and layout.dtype in KV_DTYPES
        taken = [layer for layer in layout.layers if takes and why_not_layer(layer) is None]
        self._kinds = {LayerKind.of(layer): layer for layer in taken}
        self._spares: dict[tuple[LayerKind, bool], deque[Any]] = {}
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=accelerator.device)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of layers that FlashInfer takes."""
        return tuple(self._kinds)

    def plan(self, meta: AttentionMeta) -> FlashInferPlan:
        """Plan a wrapper for each kind of layer; decode steps take the decode wrapper, all others prefill's."""
        plan = FlashInferPlan(self._triton.plan(meta))
        decode = meta.mode is ForwardMode.DECODE
        groups = {kind.group for kind in self._kinds}
        pages = {group: self._pages(plan.triton, group, meta.seq_lens) for group in groups}
        for kind, layer in self._kinds.items():
            wrapper = self._spare(kind, layer, decode=decode)
            self._plan_wrapper(wrapper, kind, pages[kind.group], None if decode else meta.query_starts)
            plan.wrappers[kind] = wrapper
        return plan

    def fixed_plan(self, rows: int) -> FlashInferPlan:
        """See ``ReplayedAttention.fixed_plan``: wrappers over memory that stays, planned for padding rows."""
        triton = self._triton.fixed_plan(rows)
        most = rows * -(-self.pool.max_length // self.pool.page_size)
        groups = {kind.group for kind in self._kinds}
        device = self._accelerator.device
        plan = FlashInferPlan(
            triton, indices={group: torch.zeros(most, dtype=torch.int32, device=device) for group in groups}
        )
        for kind, layer in self._kinds.items():
            assert plan.indices is not None
            buffers = (
                torch.zeros(rows + 1, dtype=torch.int32, device=device),
                plan.indices[kind.group],
                torch.ones(rows, dtype=torch.int32, device=device),
            )
            plan.wrappers[kind] = self._decode_wrapper(layer, buffers)
        self.refill(plan, no_rows(self.pool.num_groups))
        return plan

    def refill(self, plan: FlashInferPlan, meta: AttentionMeta) -> None:
        """See ``ReplayedAttention.refill``; wrappers are planned anew, outside what was captured."""
        self._triton.refill(plan.triton, meta)
        lengths = padded_lengths(meta, plan.triton.arrays.num_rows)
        pages = {kind.group: self._pages(plan.triton, kind.group, lengths) for kind in plan.wrappers}
        for kind, wrapper in plan.wrappers.items():
            self._plan_wrapper(wrapper, kind, pages[kind.group], None)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerKV,
        plan: FlashInferPlan,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        wrapper = plan.wrappers.get(LayerKind.of(layer))
        if wrapper is None or sinks is not None:
            return self._triton.forward(q, k, v, layer, plan.triton, sinks)
        self._triton.write(k, v, layer, plan.triton)
        scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale} if self._kv_dtype.startswith("fp8") else {}
        out: torch.Tensor = wrapper.run(q.contiguous(), self.pool.pages(layer), **scales)
        return out.reshape(q.shape[0], layer.q_heads * layer.v_dim)

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

    def _pages(self, plan: TritonPlan, group: int, lengths: Int32Array) -> PageLists:
        rows = (plan.arrays.row_ids, lengths)
        return list_pages(self._accelerator, self.pool, group, rows, self.pool.page_size)
