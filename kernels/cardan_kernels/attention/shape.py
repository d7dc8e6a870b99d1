"""What of a layer decides how its attention is launched, and what follows for the host that plans a step.

It knows no kernel. Nothing here looks at a batch, so that a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cardan.errors import UnsupportedError
from cardan_kernels.tuning import KernelConfig, choose

LARGEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of a layer.

    Attributes:
        q_heads: query heads.
        kv_heads: key and value heads; each serves ``q_heads // kv_heads`` query heads.
        k_dim: width of a key.
        v_dim: width of a value.
        dtype: type of the queries.
        kv_dtype: type of the pool.
    """

    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.q_heads % self.kv_heads:
            raise UnsupportedError(
                "query heads must be a multiple of key heads, "
                f"got {self.q_heads} and {self.kv_heads}. Check the model's config."
            )
        if max(self.k_dim, self.v_dim) > LARGEST_HEAD:
            raise UnsupportedError(
                f"heads of attention must not be wider than {LARGEST_HEAD}, got keys of {self.k_dim} and values of "
                f"{self.v_dim}. Choose the attention backend 'torch'."
            )

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.q_heads // self.kv_heads


def prefill_config(shape: AttentionShape, chip: str) -> KernelConfig:
    """How ``prefill`` is launched for such heads on a chip: ``block_m`` queries times heads, ``block_n`` keys."""
    return choose("attention_prefill", chip, _tuned_by(shape))


def decode_config(shape: AttentionShape, chip: str) -> KernelConfig:
    """How ``decode`` is launched for such heads on a chip: ``block_h`` heads at most, ``block_n`` keys."""
    return choose("attention_decode", chip, _tuned_by(shape))


def tokens_per_tile(shape: AttentionShape, chip: str) -> int:
    """Queries of one row that a tile of ``prefill`` holds, each with all query heads of a key head where they fit."""
    block_m = prefill_config(shape, chip)["block_m"]
    return block_m // min(shape.group, block_m)


def head_tiles(shape: AttentionShape, chip: str) -> int:
    """Programs of ``decode`` that one part of one row takes."""
    return shape.kv_heads * -(-shape.group // decode_config(shape, chip)["block_h"])


def _tuned_by(shape: AttentionShape) -> dict[str, int]:
    return {
        "head": max(shape.k_dim, shape.v_dim),
        "bits": 8 * shape.dtype.itemsize,
        "kv_bits": 8 * shape.kv_dtype.itemsize,
    }
