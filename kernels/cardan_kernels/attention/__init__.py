"""Attention over paged keys and values.

It knows no model, no scheduler and no platform.
"""

from cardan_kernels.attention.decode import DecodeRows, DecodeSplits, decode, scratch_size
from cardan_kernels.attention.prefill import prefill
from cardan_kernels.attention.scoring import Scoring
from cardan_kernels.attention.splits import Splits, choose_splits, fixed_splits
from cardan_kernels.attention.tiles import heads_per_tile, plan_tiles, tokens_per_tile
from cardan_kernels.paged import PagedKV

__all__ = [
    "DecodeRows",
    "DecodeSplits",
    "PagedKV",
    "Scoring",
    "Splits",
    "choose_splits",
    "decode",
    "fixed_splits",
    "heads_per_tile",
    "plan_tiles",
    "prefill",
    "scratch_size",
    "tokens_per_tile",
]
