"""The ops table of a GPU: Triton kernels for what layers do most, torch for the rest, and nothing that waits.

It knows no model and no vendor. Whatever the host needs it has before, whatever it reads it reads in the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cardan.ops import LogitAdjuster, Penalized, TokenDrawer
from cardan.types import SamplingBatch
from cardan_kernels import activation, norm, rope, sampling
from cardan_kernels.sampling import DrawInputs, Penalties, SparseBias, adjust_logits, draw_tokens
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
        temperature, top_p, min_p, top_k, positions, seeds = self._together(
            *(_float32(values) for values in (sampling.temperature, sampling.top_p, sampling.min_p)),
            *(_int32(values) for values in (sampling.top_k, sampling.positions)),
            np.ascontiguousarray(sampling.seeds, dtype="<u8").view(np.int32).reshape(-1, 2),
        )
        inputs = DrawInputs(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seeds=seeds, positions=positions
        )
        return draw_tokens(scores, inputs, logits=None if logits is scores else logits)

    def logit_adjuster(self) -> LogitAdjuster:
        """See ``Ops.logit_adjuster``."""
        return self._adjust

    def _adjust(
        self, logits: Tensor, sampling: SamplingBatch, penalized: Penalized | None, mask: np.ndarray[Any, Any] | None
    ) -> Tensor:
        """Numbers of all rows, places of biases and masks go to the device in one copy."""
        factors = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        nothing = np.zeros(0, dtype=np.int32)
        lines, repetition, frequency, presence, rows, ids, values, words = self._together(
            nothing if penalized is None else penalized.lines,
            *(_float32(factor) for factor in factors),
            *(_int32(places) for places in (sampling.bias_index, sampling.bias_ids)),
            _float32(sampling.bias_values),
            nothing if mask is None else mask.view(np.int32),
        )
        penalties = None
        if penalized is not None:
            penalties = Penalties(
                lines=lines,
                prompt=penalized.prompt,
                output=penalized.output,
                repetition=repetition,
                frequency=frequency,
                presence=presence,
            )
        bias = SparseBias(rows=rows, ids=ids, values=values) if len(sampling.bias_index) else None
        return adjust_logits(logits, penalties=penalties, mask=None if mask is None else words, bias=bias)

    def scatter_add(self, x: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
        """See ``Ops.scatter_add``; changes ``x`` in place."""
        if x.dtype is not torch.float32 or x.dim() != 2 or x.stride(1) != 1:
            return super().scatter_add(x, rows, columns, values)
        sampling.add_at(x, rows, columns, values)
        return x

    def _together(self, *arrays: np.ndarray[Any, Any]) -> list[Tensor]:
        """Arrays of int32 and float32 on the device, by one copy from one pinned buffer."""
        starts = np.cumsum([0, *(-(-array.size // ALIGNED) * ALIGNED for array in arrays)]).tolist()
        packed = np.zeros(starts[-1], dtype=np.int32)
        for start, array in zip(starts, arrays, strict=False):
            packed[start : start + array.size] = np.ascontiguousarray(array).reshape(-1).view(np.int32)
        moved = self._accelerator.upload(packed)
        return [
            moved[start : start + array.size]
            .view(torch.float32 if array.dtype == np.float32 else torch.int32)
            .view(array.shape)
            for start, array in zip(starts, arrays, strict=False)
        ]

    def gumbel(self, seeds: Any, positions: Any, ids: Tensor | int) -> Tensor:
        """See ``Ops.gumbel``."""
        halves = np.ascontiguousarray(seeds, dtype="<u8").view(np.int32).reshape(-1, 2)
        keys = np.concatenate((halves, np.asarray(positions).astype(np.int32)[:, None]), axis=1)
        moved = self._accelerator.upload(keys)
        return sampling.gumbel(moved[:, :2].contiguous(), moved[:, 2].contiguous(), ids)


def _float32(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return values.astype(np.float32, copy=False)


def _int32(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return values.astype(np.int32, copy=False)


def _top_ids(x: Tensor, k: int) -> Tensor:
    """Columns of the ``k`` largest of each row of float32 scores, int64 ``[rows, k]``."""
    bits = (x + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which it equals
    ordered = (bits ^ ((bits >> 31) & SIGN_BIT)).to(torch.int64)
    columns = torch.arange(x.shape[-1], device=x.device)
    keys = (ordered << 32) + (LOW_HALF - columns)
    top = torch.topk(keys, k, dim=-1).values
    return LOW_HALF - (top & LOW_HALF)
