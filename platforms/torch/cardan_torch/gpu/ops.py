"""The ops table of a GPU: Triton kernels for what layers do most, torch for the rest, and nothing that waits.

It knows no model and no vendor. Whatever the host needs it has before, whatever it reads it reads in the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cardan.ops import TokenDrawer
from cardan.types import SamplingBatch
from cardan_kernels import activation, norm, rope, sampling
from cardan_kernels.sampling import DrawInputs, draw_tokens
from cardan_torch.gpu.accelerator import Accelerator
from cardan_torch.ops import TorchOps
from cardan_torch.tensors import torch_dtype

Tensor = torch.Tensor

ALIGNED = 4
"""Fields of what is copied together begin at multiples of 16 bytes, so that kernels are compiled once."""

LOW_HALF = 0xFFFFFFFF
SIGN_BIT = 0x7FFFFFFF

TOPK_ELEMENTS = 1 << 23
"""Scores that are ranked at once: their keys of 64 bits take 64 MiB."""

WIDE_TYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)
"""Types that numpy lacks."""


@dataclass(frozen=True, slots=True)
class Rotated:
    """One step's rotation.

    Attributes:
        positions: int32 ``[tokens]``.
        rotation: the tables.
    """

    positions: Tensor
    rotation: rope.Rotation


class GpuOps(TorchOps):
    """torch and Triton on one GPU."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator.device)
        self._accelerator = accelerator

    # --- host and device ---

    def from_host(self, array: np.ndarray[Any, Any], dtype: str | None = None) -> Tensor:
        """See ``Ops.from_host``; the copy is enqueued, from memory of its own."""
        moved = self._accelerator.upload(array)
        return moved.to(torch_dtype(dtype)) if dtype else moved

    def to_host(self, x: Tensor) -> np.ndarray[Any, Any]:
        """See ``Ops.to_host``; the one operation that waits."""
        wide = x.float() if x.dtype in WIDE_TYPES else x
        return np.array(wide.detach().cpu().numpy())

    # --- layers ---

    def linear_float32(self, x: Tensor, weight: Any) -> Tensor:
        """See ``Ops.linear_float32``."""
        wide = getattr(weight, "apply_float32", None)
        out: Tensor = super().linear_float32(x, weight) if wide is None else wide(x)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``Ops.rms_norm``."""
        return norm.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See ``Ops.add_rms_norm``."""
        return norm.add_rms_norm(x, residual, weight, eps)

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """See ``Ops.rope``."""
        return rope.rope(x, positions, rope.Rotation(cos, sin, interleaved))

    def rope_prepare(  # type: ignore[override]
        self, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> Rotated:
        """See ``Ops.rope_prepare``; the kernel looks rows up itself."""
        return Rotated(positions, rope.Rotation(cos, sin, interleaved))

    def rope_apply(self, x: Tensor, prepared: Rotated) -> Tensor:  # type: ignore[override]
        """See ``Ops.rope_apply``."""
        return rope.rope(x, prepared.positions, prepared.rotation)

    def silu_mul(self, gate_up: Tensor, size: int) -> Tensor:
        """See ``Ops.silu_mul``."""
        return activation.silu_mul(gate_up, size)

    def gelu_mul(self, gate_up: Tensor, size: int, approximate: bool) -> Tensor:
        """See ``Ops.gelu_mul``."""
        return activation.gelu_mul(gate_up, size, approximate)

    # --- logits and sampling ---

    def topk(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See ``Ops.topk``.

        A score and its id make one whole number whose order is that of scores, then of ids backwards. All differ, so
        that no tie is left open and none has to be looked for.
        """
        if k == 1:
            best = torch.argmax(x, dim=-1, keepdim=True)
            return x.gather(-1, best), best.to(torch.int32)
        step = max(1, TOPK_ELEMENTS // x.shape[-1])
        ids = torch.cat([_top_ids(x[start : start + step], k) for start in range(0, max(len(x), 1), step)])
        return x.gather(-1, ids), ids.to(torch.int32)

    def token_drawer(self) -> TokenDrawer:
        """See ``Ops.token_drawer``."""
        return self._draw

    def _draw(self, scores: Tensor, sampling: SamplingBatch, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Everything that rows are drawn by goes to the device in one copy."""
        rows = len(sampling.row_ids)
        width = -(-rows // ALIGNED) * ALIGNED
        packed = np.zeros(7 * width, dtype=np.int32)
        lines = packed[: 5 * width].reshape(5, width)
        floats = np.stack((sampling.temperature, sampling.top_p, sampling.min_p)).astype(np.float32)
        lines[:3, :rows] = floats.view(np.int32)
        lines[3, :rows], lines[4, :rows] = sampling.top_k, sampling.positions
        packed[5 * width : 5 * width + 2 * rows] = np.ascontiguousarray(sampling.seeds, dtype="<u8").view(np.int32)
        moved = self._accelerator.upload(packed)
        temperature, top_p, min_p, top_k, positions = moved[: 5 * width].view(5, width)[:, :rows]
        inputs = DrawInputs(
            temperature=temperature.view(torch.float32),
            top_k=top_k,
            top_p=top_p.view(torch.float32),
            min_p=min_p.view(torch.float32),
            seeds=moved[5 * width : 5 * width + 2 * rows].view(rows, 2),
            positions=positions,
        )
        return draw_tokens(scores, inputs, logits=None if logits is scores else logits)

    def gumbel(self, seeds: Any, positions: Any, ids: Tensor | int) -> Tensor:
        """See ``Ops.gumbel``."""
        halves = np.ascontiguousarray(seeds, dtype="<u8").view(np.int32).reshape(-1, 2)
        keys = np.concatenate((halves, np.asarray(positions).astype(np.int32)[:, None]), axis=1)
        moved = self._accelerator.upload(keys)
        return sampling.gumbel(moved[:, :2].contiguous(), moved[:, 2].contiguous(), ids)


def _top_ids(x: Tensor, k: int) -> Tensor:
    """Columns of the ``k`` largest of each row of float32 scores, int64 ``[rows, k]``."""
    bits = (x + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which it equals
    ordered = (bits ^ ((bits >> 31) & SIGN_BIT)).to(torch.int64)
    columns = torch.arange(x.shape[-1], device=x.device)
    keys = (ordered << 32) + (LOW_HALF - columns)
    top = torch.topk(keys, k, dim=-1).values
    return LOW_HALF - (top & LOW_HALF)
