"""``TorchOps``: the ops table on torch tensors, eagerly, on whatever device torch was given.

It knows no model and no hardware; what a device does better it overrides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from cardan.ops import Ops
from cardan.platform import Communicator
from cardan_torch import noise
from cardan_torch.tensors import torch_dtype

Tensor = torch.Tensor

_RELATIONS: dict[str, Callable[..., Tensor]] = {
    "<": torch.lt,
    "<=": torch.le,
    ">": torch.gt,
    ">=": torch.ge,
    "==": torch.eq,
    "!=": torch.ne,
}
_OPERATIONS: dict[str, Callable[..., Tensor]] = {"+": torch.add, "-": torch.sub, "*": torch.mul, "/": torch.div}


@dataclass(frozen=True, slots=True)
class RopeRows:
    """Cosines and sines of one step's tokens, laid out for the fewest torch calls.

    Attributes:
        cos: float32 ``[tokens, 1, rotary_dim]``, each cosine at both features of its pair.
        sin: float32 ``[tokens, 1, rotary_dim]``, negative at the first feature of a pair.
        interleaved: whether pairs are neighbours.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool


class TorchOps(Ops):
    """Every op as one or a few torch calls.

    Attributes:
        device: where tensors are.
        communicator: with the other ranks; None where this is the only one.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.communicator: Communicator | None = None
        self._bit_places = torch.arange(32, dtype=torch.int32, device=self.device)

    # --- host and device ---

    def from_host(self, array: np.ndarray[Any, Any], dtype: str | None = None) -> Tensor:
        """See ``Ops.from_host``."""
        tensor = torch.from_numpy(np.array(array, order="C"))
        return tensor.to(self.device, torch_dtype(dtype) if dtype else None)

    def to_host(self, x: Tensor) -> np.ndarray[Any, Any]:
        """See ``Ops.to_host``."""
        wide = x.float() if x.dtype is torch.bfloat16 else x
        return np.array(wide.detach().cpu().numpy())

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        """See ``Ops.cast``."""
        return x.to(torch_dtype(dtype))

    # --- layers ---

    def embed(self, ids: Tensor, table: Any) -> Tensor:
        """See ``Ops.embed``."""
        rows: Tensor = table.gather(ids)
        return rows

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        """See ``Ops.linear``."""
        out: Tensor = weight.apply(x)
        return out

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """See ``Ops.add``; the result has ``a``'s type."""
        return torch.add(a, b if b.dtype is a.dtype else b.to(a.dtype))

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """See ``Ops.mul``; the result has ``a``'s type."""
        return torch.mul(a, b if b.dtype is a.dtype else b.to(a.dtype))

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """See ``Ops.scale``."""
        return torch.mul(x, factor)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``Ops.rms_norm``."""
        if x.dtype is torch.float32:
            return functional.rms_norm(x, (x.shape[-1],), weight, eps)
        return functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """See ``Ops.layer_norm``."""
        shift = None if bias is None else bias.float()
        return functional.layer_norm(x.float(), (x.shape[-1],), weight.float(), shift, eps).to(x.dtype)

    def silu(self, x: Tensor) -> Tensor:
        """See ``Ops.silu``."""
        return functional.silu(x)

    def gelu(self, x: Tensor, approximate: bool) -> Tensor:
        """See ``Ops.gelu``."""
        return functional.gelu(x, approximate="tanh" if approximate else "none")

    def tanh_softcap(self, x: Tensor, cap: float) -> Tensor:
        """See ``Ops.tanh_softcap``."""
        return torch.div(x, cap).tanh_().mul_(cap)

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """See ``Ops.rope``."""
        return self.rope_apply(x, self.rope_prepare(positions, cos, sin, interleaved))

    def rope_prepare(self, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> RopeRows:
        """See ``Ops.rope_prepare``."""
        cos_rows, sin_rows = cos.index_select(0, positions), sin.index_select(0, positions)
        if interleaved:
            wide_cos = cos_rows.repeat_interleave(2, dim=-1)
            wide_sin = torch.stack((-sin_rows, sin_rows), dim=-1).flatten(1)
        else:
            wide_cos = torch.cat((cos_rows, cos_rows), dim=-1)
            wide_sin = torch.cat((-sin_rows, sin_rows), dim=-1)
        return RopeRows(wide_cos[:, None], wide_sin[:, None], interleaved)

    def rope_apply(self, x: Tensor, prepared: RopeRows) -> Tensor:
        """See ``Ops.rope_apply``."""
        rotary = prepared.cos.shape[-1]
        if rotary < x.shape[-1]:
            turned = self.rope_apply(x[..., :rotary], prepared)
            return torch.cat((turned, x[..., rotary:]), dim=-1)
        wide = x if x.dtype is torch.float32 else x.float()
        if prepared.interleaved:
            swapped = wide.view(*wide.shape[:-1], rotary // 2, 2).flip(-1).flatten(-2)
        else:
            swapped = wide.roll(rotary // 2, -1)
        out = torch.mul(wide, prepared.cos).addcmul_(swapped, prepared.sin)
        return out if x.dtype is torch.float32 else out.to(x.dtype)

    def split(self, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """See ``Ops.split``."""
        return torch.split_with_sizes(x, list(sizes), dim=-1)

    def concat(self, xs: Sequence[Tensor]) -> Tensor:
        """See ``Ops.concat``."""
        return torch.cat(tuple(xs), dim=-1)

    def split_heads(self, x: Tensor, heads: int) -> Tensor:
        """See ``Ops.split_heads``."""
        return x.view(x.shape[0], heads, x.shape[-1] // heads)

    def merge_heads(self, x: Tensor) -> Tensor:
        """See ``Ops.merge_heads``."""
        return x.flatten(1)

    def reshape(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """See ``Ops.reshape``."""
        return x.reshape(shape)

    def gather_rows(self, x: Tensor, index: Tensor) -> Tensor:
        """See ``Ops.gather_rows``."""
        return x.index_select(0, index)

    def scatter_rows(self, x: Tensor, index: Tensor, values: Tensor) -> Tensor:
        """See ``Ops.scatter_rows``; changes ``x`` in place."""
        return x.index_copy_(0, index.to(torch.int64), values.to(x.dtype))

    # --- logits and sampling ---

    def where(self, condition: Tensor, a: Tensor, b: Tensor | float) -> Tensor:
        """See ``Ops.where``; the result has ``a``'s type."""
        return torch.where(condition, a, b).to(a.dtype)

    def compare(self, a: Tensor, relation: str, b: Tensor | float) -> Tensor:
        """See ``Ops.compare``."""
        return _RELATIONS[relation](a, b)

    def arithmetic(self, a: Tensor, operation: str, b: Tensor | float) -> Tensor:
        """See ``Ops.arithmetic``."""
        return _OPERATIONS[operation](a, b)

    def is_nan(self, x: Tensor) -> Tensor:
        """See ``Ops.is_nan``."""
        return torch.isnan(x).any(dim=-1)

    def log_softmax(self, x: Tensor) -> Tensor:
        """See ``Ops.log_softmax``."""
        return torch.log_softmax(x, dim=-1)

    def logsumexp(self, x: Tensor) -> Tensor:
        """See ``Ops.logsumexp``."""
        return torch.logsumexp(x, dim=-1)

    def argmax(self, x: Tensor) -> Tensor:
        """See ``Ops.argmax``."""
        return torch.argmax(x, dim=-1).to(torch.int32)

    def topk(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See ``Ops.topk``.

        torch's own ``topk`` leaves the order of equal values open, and which of them fall off the end. Ties inside
        are put in order by two small sorts; a tie across the end, found by counting, takes the slow stable sort.
        """
        if k == 1:
            best = torch.argmax(x, dim=-1, keepdim=True)
            return x.gather(-1, best), best.to(torch.int32)
        if k == x.shape[-1]:
            values, ids = x.sort(dim=-1, descending=True, stable=True)
            return values, ids.to(torch.int32)
        values, ids = torch.topk(x, k, dim=-1)
        ids, by_id = ids.sort(dim=-1)
        values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(-1, by_value)
        crowded = (x >= values[:, -1:]).sum(dim=-1) != k
        if bool(crowded.any()):
            rows = crowded.nonzero()[:, 0]
            stable_values, stable_ids = x.index_select(0, rows).sort(dim=-1, descending=True, stable=True)
            values = values.index_copy(0, rows, stable_values[:, :k])
            ids = ids.index_copy(0, rows, stable_ids[:, :k])
        return values, ids.to(torch.int32)

    def cumsum(self, x: Tensor) -> Tensor:
        """See ``Ops.cumsum``."""
        return torch.cumsum(x, dim=-1)

    def exp(self, x: Tensor) -> Tensor:
        """See ``Ops.exp``."""
        return torch.exp(x)

    def take_columns(self, x: Tensor, index: Tensor) -> Tensor:
        """See ``Ops.take_columns``."""
        return x.gather(-1, index.to(torch.int64))

    def scatter_add(self, x: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
        """See ``Ops.scatter_add``; changes ``x`` in place."""
        return x.index_put_((rows.to(torch.int64), columns.to(torch.int64)), values.to(x.dtype), accumulate=True)

    def unpack_bits(self, mask: Tensor, columns: int) -> Tensor:
        """See ``Ops.unpack_bits``."""
        bits = (mask[:, :, None] >> self._bit_places) & 1
        return bits.flatten(1)[:, :columns].to(torch.bool)

    def gumbel(self, seeds: np.ndarray[Any, Any], positions: np.ndarray[Any, Any], ids: Tensor | int) -> Tensor:
        """See ``Ops.gumbel``."""
        return noise.gumbel(seeds, positions, ids, self.device)

    # --- ranks ---

    def all_reduce(self, x: Tensor) -> Tensor:
        """See ``Ops.all_reduce``."""
        return x if self.communicator is None else self.communicator.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """See ``Ops.all_gather``."""
        return x if self.communicator is None else self.communicator.all_gather(x)

    # --- fused ---

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See ``Ops.add_rms_norm``."""
        total = torch.add(x, residual)
        return self.rms_norm(total, weight, eps), total

    def permute_columns(self, x: Tensor, order: Tensor) -> Tensor:
        """See ``Ops.permute_columns``."""
        return x.index_select(-1, order)

    def silu_mul(self, gate_up: Tensor, size: int) -> Tensor:
        """See ``Ops.silu_mul``."""
        return functional.silu(gate_up[..., :size]).mul_(gate_up[..., size:])

    def gelu_mul(self, gate_up: Tensor, size: int, approximate: bool) -> Tensor:
        """See ``Ops.gelu_mul``."""
        return self.gelu(gate_up[..., :size], approximate).mul_(gate_up[..., size:])
