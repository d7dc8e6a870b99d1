"""GPU platforms on the stand-in for a GPU, and libraries for GPUs as their pages describe them, in plain torch.

It knows no test. The libraries stand in for FlashInfer and AITER: they check what they are given as the real ones do,
and attend row by row in float64.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from runner_harness import RunnerHarness

from cardan_cuda import CudaPlatform
from cardan_rocm import RocmPlatform
from cardan_torch.gpu.emulation import launch

PLATFORMS = {"cuda": CudaPlatform, "rocm": RocmPlatform}


def emulated(name: str, **options: Any) -> Any:
    """A platform configured for the stand-in."""
    platform = PLATFORMS[name]()
    values = {spec.name: spec.default for spec in platform.options()}
    return platform.configured({**values, "device": "emulated", **options})


def harness(name: str, model: Path, *, top_bucket: int = 2, **settings: Any) -> RunnerHarness:
    """A model on a platform's stand-in, with graphs of few sizes."""
    platform = emulated(name)
    return RunnerHarness(
        model, platform, options={"device": "emulated", "cuda_graph_max_bs_decode": top_bucket}, **settings
    )


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **how: Any) -> torch.Tensor:
    """``q: [n, q_heads, dim]`` over the keys of its row, ``[length, kv_heads, dim]``, causally at the row's end."""
    n, length, shared = len(q), len(keys), q.shape[1] // keys.shape[1]
    wide_k, wide_v = (x.double().repeat_interleave(shared, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), wide_k) * how["scale"]
    if how.get("softcap"):
        scores = how["softcap"] * torch.tanh(scores / how["softcap"])
    back = torch.arange(length - n, length)[:, None] - torch.arange(length)[None]
    hidden = back < 0
    if how.get("window_left", -1) >= 0:
        hidden |= back > how["window_left"]
    weights = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, wide_v).to(q.dtype)


@dataclass
class FakeWrapper:
    """What both of FlashInfer's paged wrappers share."""

    workspace: torch.Tensor
    kv_layout: str
    use_tensor_cores: bool = False
    use_cuda_graph: bool = False
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    plans: int = 0

    def keep(self, arrays: dict[str, torch.Tensor], how: dict[str, Any], heads: tuple[int, int, int, int]) -> None:
        """Take a plan; under graphs only into the memory that was given at first."""
        self.plans += 1
        self.how, self.heads = how, heads
        assert all(x.dtype is torch.int32 and x.dim() == 1 for x in arrays.values())
        assert len(arrays["indices"]) == int(arrays["indptr"][-1])
        if not self.use_cuda_graph:
            self.buffers = {name: x.clone() for name, x in arrays.items()}
            return
        for name, x in arrays.items():
            buffer = self.buffers[name]
            assert len(x) <= len(buffer) if name == "indices" else len(x) == len(buffer), name
            buffer[: len(x)].copy_(x)

    def attend(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], starts: list[int]) -> torch.Tensor:
        """Row by row over pages."""
        q_heads, kv_heads, dim, page = self.heads
        assert q.is_contiguous()
        assert q.shape[1:] == (q_heads, dim)
        assert q.dtype == self.how["q_data_type"]
        assert q.dtype in (torch.bfloat16, torch.float16)
        assert all(part.shape[1:] == (page, kv_heads, dim) for part in cache)
        assert all(part.dtype == self.how["kv_data_type"] for part in cache)
        out = torch.empty_like(q)
        how = {
            "scale": self.how["sm_scale"],
            "softcap": self.how["logits_soft_cap"],
            "window_left": self.how["window_left"],
        }
        indptr, indices, last = (self.buffers[name] for name in ("indptr", "indices", "last"))

        def kernel() -> None:
            for row in range(len(last)):
                pages = indices[indptr[row] : indptr[row + 1]].long()
                length = (len(pages) - 1) * page + int(last[row])
                keys, values = (part.float().index_select(0, pages).flatten(0, 1)[:length] for part in cache)
                part = slice(starts[row], starts[row + 1])
                out[part] = attend(q[part], keys, values, **how)

        launch(kernel)
        return out


class BatchDecodeWithPagedKVCacheWrapper(FakeWrapper):
    """As FlashInfer's."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> None:
        buffers = {}
        if use_cuda_graph:
            names = ("indptr", "indices", "last")
            given = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
            buffers = dict(zip(names, given, strict=True))
        super().__init__(float_workspace_buffer, kv_layout, use_tensor_cores, use_cuda_graph, buffers)

    def plan(
        self, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int, head_dim: int,
        page_size: int, *, window_left: int = -1, logits_soft_cap: float | None = None, q_data_type: Any = None,
        kv_data_type: Any = None, sm_scale: float | None = None,
    ) -> None:  # fmt: skip
        how = {name: value for name, value in locals().items() if name in HOW}
        arrays = {"indptr": indptr, "indices": indices, "last": last_page_len}
        self.keep(arrays, how, (num_qo_heads, num_kv_heads, head_dim, page_size))

    def run(self, q: torch.Tensor, paged_kv_cache: Any, *, k_scale: Any = None, v_scale: Any = None) -> torch.Tensor:
        return self.attend(q, paged_kv_cache, list(range(len(q) + 1)))


class BatchPrefillWithPagedKVCacheWrapper(FakeWrapper):
    """As FlashInfer's."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self, qo_indptr: Any, paged_kv_indptr: Any, paged_kv_indices: Any, paged_kv_last_page_len: Any,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool = False,
        window_left: int = -1, logits_soft_cap: float | None = None, q_data_type: Any = None,
        kv_data_type: Any = None, sm_scale: float | None = None,
    ) -> None:  # fmt: skip
        assert causal
        how = {name: value for name, value in locals().items() if name in HOW}
        arrays = {"indptr": paged_kv_indptr, "indices": paged_kv_indices, "last": paged_kv_last_page_len}
        self.starts = qo_indptr.tolist()
        self.keep(arrays, how, (num_qo_heads, num_kv_heads, head_dim_qk, page_size))

    def run(self, q: torch.Tensor, paged_kv_cache: Any, *, k_scale: Any = None, v_scale: Any = None) -> torch.Tensor:
        return self.attend(q, paged_kv_cache, self.starts)


HOW = ("window_left", "logits_soft_cap", "q_data_type", "kv_data_type", "sm_scale")


def fake_flashinfer() -> ModuleType:
    """A module with the two wrappers."""
    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    return module


def paged_attention_ragged(
    out: Any, workspace: Any, q: Any, keys: Any, values: Any, scale: float, starts: Any, slots: Any, last: Any,
    block_size: int, parts: int, alibi: Any, kv_cache_dtype: str, layout: str, softcap: float, k_scale: Any,
    v_scale: Any, fp8_out_scale: Any, partition: int,
) -> None:  # fmt: skip
    """As AITER's decode, over pages of one slot."""
    rows, heads, dim = q.shape
    assert workspace.dtype is torch.uint8
    assert workspace.numel() >= 4 * rows * heads * parts * (dim + 2)
    assert (block_size, layout, kv_cache_dtype, alibi, fp8_out_scale) == (1, "NHD", "auto", None, None)
    assert keys.shape[1] == 1

    def kernel() -> None:
        for row in range(rows):
            length = int(starts[row + 1] - starts[row])
            assert length <= parts * partition
            mine = slots[starts[row] : starts[row + 1]].long()
            how = {"scale": scale, "softcap": softcap}
            out[row : row + 1] = attend(q[row : row + 1], keys[mine, 0], values[mine, 0], **how)

    launch(kernel)


def mha_batch_prefill_func(
    q: Any, keys: Any, values: Any, query_starts: Any, starts: Any, slots: Any, most_queries: int, longest: int, *,
    softmax_scale: float, logits_soft_cap: float, causal: bool,
) -> torch.Tensor:  # fmt: skip
    """As AITER's paged prefill, over pages of one slot."""
    assert causal
    out = torch.empty_like(q)
    for row in range(len(starts) - 1):
        part = slice(int(query_starts[row]), int(query_starts[row + 1]))
        assert part.stop - part.start <= most_queries
        mine = slots[starts[row] : starts[row + 1]].long()
        assert len(mine) <= longest
        out[part] = attend(q[part], keys[mine], values[mine], scale=softmax_scale, softcap=logits_soft_cap)
    return out


def fake_aiter() -> ModuleType:
    """A module with the two attention functions, and one with the GEMM."""
    module = ModuleType("aiter")
    module.paged_attention_ragged = paged_attention_ragged  # type: ignore[attr-defined]
    module.mha_batch_prefill_func = mha_batch_prefill_func  # type: ignore[attr-defined]
    return module


def install(monkeypatch: Any, name: str, module: ModuleType) -> None:
    """Put a module in the place of an installed one."""
    monkeypatch.setitem(sys.modules, name, module)
