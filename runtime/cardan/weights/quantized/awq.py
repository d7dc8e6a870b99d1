"""Linears as AutoAWQ's GEMM version stores them.

``qweight`` int32 ``[in, out / 8]``, ``qzeros`` int32 ``[groups, out / 8]``, ``scales`` ``[groups, out]``; a value is
``scale * (code - zero)``. Nibble i of a word is its column ``PLACES[i]``.
Source: the format of Lin et al., "AWQ: Activation-aware Weight Quantization", as its checkpoints have it.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from cardan.types import Int32Array
from cardan.weights.quantized.codes import Bytes, rows_of_nibbles, unpack_words
from cardan.weights.quantized.grouped import affine_blocks, grouped_format
from cardan.weights.quantized.module import SCALES, Entry, Groups, Module, Packed, groups_of
from cardan.weights.quantized.reader import Reader
from cardan.weights.quantized.settings import ModuleNames, Settings

PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of its eight columns each nibble of a word is, the lowest first."""


class AwqReader(Reader):
    """AWQ with the settings of one checkpoint."""

    codes = (".qweight",)
    parts = (".qzeros", ".scales")

    def __init__(self, settings: Settings) -> None:
        """Read them.

        Raises:
            CheckpointError: they are of a kind that Cardan does not read.
        """
        keys = settings.values
        settings.whole("w_bit" if "bits" not in keys and "w_bit" in keys else "bits", (4,))
        self._group = settings.whole("q_group_size" if "group_size" not in keys and "q_group_size" in keys else
                                     "group_size", default=128)  # fmt: skip
        settings.text("version", ("gemm",), "gemm")
        self._left_out = ModuleNames(settings.names("modules_to_not_convert"), "modules_to_not_convert")
        self.summary = f"AWQ, 4 bits with zero points, groups of {self._group}"

    def takes(self, module: str, suffix: str, entry: Entry) -> bool:
        """All but what the config leaves out."""
        return module not in self._left_out

    def describe(self, module: Module) -> Packed:
        """See ``Reader.describe``."""
        columns, words = module.matrix(".qweight", ("I32",))
        groups = groups_of(module, 8 * words, columns, self._group)
        module.require(".qzeros", ("I32",), (groups.count, words))
        scale, _ = module.require(".scales", SCALES, (groups.count, groups.rows))
        fmt = grouped_format(groups, 4, scale, symmetric=False)
        return Packed(fmt, (groups.rows, groups.columns), partial(_blocks, module, groups))


def _blocks(module: Module, groups: Groups) -> tuple[Bytes, Int32Array | None]:
    codes = rows_of_nibbles(module.numbers(".qweight"), PLACES)
    zeros = unpack_words(module.numbers(".qzeros"), 4, PLACES)
    return affine_blocks(groups, codes, np.ascontiguousarray(module.floats(".scales").T), zeros.T), None
