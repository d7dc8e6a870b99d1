"""Attention over paged keys and values.

It knows no model, no scheduler and no platform.
"""

from cardan_kernels.attention.decode import DecodeRows, DecodeSplits, decode, scratch_size
from cardan_kernels.attention.prefill import prefill
from cardan_kernels.attention.scoring import Scoring
from cardan_kernels.attention.shape import AttentionShape, decode_config, head_tiles, prefill_config, tokens_per_tile
from cardan_kernels.attention.splits import Splits, choose_splits, fixed_splits
from cardan_kernels.attention.tiles import plan_tiles

__all__ = [
    "AttentionShape",
    "DecodeRows",
    "DecodeSplits",
    "Scoring",
    "Splits",
    "choose_splits",
    "decode",
    "decode_config",
    "fixed_splits",
    "head_tiles",
    "plan_tiles",
    "prefill",
    "prefill_config",
    "scratch_size",
    "tokens_per_tile",
]
