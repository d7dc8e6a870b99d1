"""``NpuOps``: the ops table with torch_npu's fused operators where their documentation lets them be called.

It knows no model. What is not overridden is torch's own, as for every torch device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch_npu
from torch.utils.weak import WeakIdKeyDictionary

from cardan_npu.noise import noise_of_words
from cardan_torch import TorchOps, noise
from cardan_torch.ops import RopeRows

Tensor = torch.Tensor

MOST_HEADS = 999
"""``npu_rotary_mul`` takes less than 1,000 heads."""
MOST_ROTARY = 895


@dataclass(frozen=True, slots=True)
class ScaledRopeRows(RopeRows):
    """Rows of a table that exceeds -1 .. 1, as stretched rotations have: ``npu_rotary_mul`` takes no such values.

    Attributes:
        largest: of the table; rows are divided by it, and what they rotate is multiplied by it.
    """

    largest: float


class NpuOps(TorchOps):
    """Norms, rotations, gates and noise on an NPU."""

    def __init__(self, device: torch.device | str) -> None:
        """Make the table of a device."""
        super().__init__(device)
        self._narrowed: Any = WeakIdKeyDictionary()
        self._largest: Any = WeakIdKeyDictionary()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``Ops.rms_norm``; the operator wants the weight in the type of ``x``."""
        gamma = self._gamma(weight, x.dtype)
        if gamma is None:
            out: Tensor = torch_npu.npu_rms_norm(x.float(), weight.float(), eps)[0]
            return out.to(x.dtype)
        normed: Tensor = torch_npu.npu_rms_norm(x, gamma, eps)[0]
        return normed

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See ``Ops.add_rms_norm``."""
        gamma = self._gamma(weight, x.dtype)
        if gamma is None or x.dtype is not residual.dtype:
            return super().add_rms_norm(x, residual, weight, eps)
        normed, _, total = torch_npu.npu_add_rms_norm(x, residual, gamma, eps)
        return normed, total

    def _gamma(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The weight in another type where that holds its values, else None; looked at once for each weight.

        The first step of a model runs eagerly, so that no captured one has to look.
        """
        if weight.dtype is dtype:
            return weight
        kept: dict[torch.dtype, Tensor | None] = self._narrowed.setdefault(weight, {})
        if dtype not in kept:
            narrow = weight.to(dtype)
            kept[dtype] = narrow if bool((narrow.to(weight.dtype) == weight).all()) else None
        return kept[dtype]

    def rope_prepare(self, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> RopeRows:
        """See ``Ops.rope_prepare``: cosines and sines ``[tokens, 1, rotary_dim]``, both at both features of a pair."""
        largest = max(self._largest_of(cos), self._largest_of(sin))
        tables = [table.index_select(0, positions) for table in (cos, sin)]
        if largest > 1:
            tables = [rows / largest for rows in tables]
        if interleaved:
            both = [rows.repeat_interleave(2, dim=-1)[:, None] for rows in tables]
        else:
            both = [torch.cat((rows, rows), dim=-1)[:, None] for rows in tables]
        cos_rows, sin_rows = both
        if largest > 1:
            return ScaledRopeRows(cos_rows, sin_rows, interleaved, largest)
        return RopeRows(cos_rows, sin_rows, interleaved)

    def _largest_of(self, table: Tensor) -> float:
        """The largest size in a table of cosines or sines; looked at once, by the first step, which runs eagerly."""
        found: float | None = self._largest.get(table)
        if found is None:
            found = self._largest[table] = float(table.abs().max()) if table.numel() else 0.0
        return found

    def rope_apply(self, x: Tensor, prepared: RopeRows) -> Tensor:
        """See ``Ops.rope_apply``; angles are float32, so ``x`` is widened for the operator and rounded once."""
        rotary = prepared.cos.shape[-1]
        if rotary < x.shape[-1]:
            turned = self.rope_apply(x[..., :rotary], prepared)
            return torch.cat((turned, x[..., rotary:]), dim=-1)
        if x.shape[0] == 0 or x.shape[1] > MOST_HEADS or rotary > MOST_ROTARY:
            return _turn(x, prepared)
        mode = "interleave" if prepared.interleaved else "half"
        out: Tensor = torch_npu.npu_rotary_mul(x.float()[None], prepared.cos[None], prepared.sin[None], mode)
        return _unscaled(out[0], prepared).to(x.dtype)

    def silu_mul(self, gate_up: Tensor, size: int) -> Tensor:
        """See ``Ops.silu_mul``."""
        if gate_up.numel() == 0 or not gate_up.is_contiguous() or gate_up.shape[-1] != 2 * size:
            return super().silu_mul(gate_up, size)
        out: Tensor = torch_npu.npu_swiglu(gate_up, -1)
        return out

    def gumbel(self, seeds: np.ndarray[Any, Any], positions: np.ndarray[Any, Any], ids: Tensor | int) -> Tensor:
        """See ``Ops.gumbel``; in float32, so within a few units of the last place."""
        return noise.gumbel(seeds, positions, ids, self.device, noise_of_words)


def _unscaled(turned: Tensor, prepared: RopeRows) -> Tensor:
    return turned * prepared.largest if isinstance(prepared, ScaledRopeRows) else turned


def _turn(x: Tensor, prepared: RopeRows) -> Tensor:
    """The same by torch's own operators."""
    wide, rotary = x.float(), prepared.cos.shape[-1]
    if prepared.interleaved:
        pairs = wide.view(*wide.shape[:-1], rotary // 2, 2)
        swapped = torch.stack((-pairs[..., 1], pairs[..., 0]), dim=-1).flatten(-2)
    else:
        swapped = torch.cat((-wide[..., rotary // 2 :], wide[..., : rotary // 2]), dim=-1)
    turned = torch.mul(wide, prepared.cos).addcmul_(swapped, prepared.sin)
    return _unscaled(turned, prepared).to(x.dtype)
