"""Linears with weights of 4-bit floats, 32 of which share a power of two.

``*_blocks`` uint8 ``[..., groups, 16]``, two codes a byte, the first in its low half; ``*_scales`` uint8
``[..., groups]``, exponents plus 127.
Source: OCP Microscaling Formats (MX) Specification v1.0.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from cardan.types import Int32Array
from cardan.weights.quantized.codes import Bytes
from cardan.weights.quantized.module import Entry, Module, Packed
from cardan.weights.quantized.reader import Reader
from cardan.weights.quantized.settings import ModuleNames, Settings

GROUP = 32
_NAN = 255


class Mxfp4Reader(Reader):
    """``mxfp4`` with the settings of one checkpoint."""

    codes = ("_blocks",)
    parts = ("_scales",)
    summary = "MXFP4, groups of 32"

    def __init__(self, settings: Settings) -> None:
        """Read them.

        Raises:
            CheckpointError: they are of a kind that Cardan does not read.
        """
        self._left_out = ModuleNames(settings.names("modules_to_not_convert"), "modules_to_not_convert")

    def takes(self, module: str, suffix: str, entry: Entry) -> bool:
        """All but what the config leaves out."""
        return module.removesuffix(".weight") not in self._left_out

    def describe(self, module: Module) -> Packed:
        """See ``Reader.describe``."""
        shape = module.require("_blocks", ("U8",))[1]
        if len(shape) < 3 or shape[-1] != GROUP // 2:
            module.fail(f"{module.name}_blocks has shape {list(shape)}, expected [..., groups, {GROUP // 2}]")
        module.require("_scales", ("U8",), shape[:-1])
        whole = (*shape[:-2], shape[-2] * GROUP)
        return Packed("MXFP4", whole, partial(mxfp4_blocks, module, "_blocks", "_scales"))

    def target(self, module: str) -> str:
        """The name that ``_blocks`` and ``_scales`` follow."""
        return module


def mxfp4_blocks(module: Module, codes: str, scales: str) -> tuple[Bytes, Int32Array | None]:
    """Blocks of ``MXFP4``: the exponent, and codes 16 apart in the halves of a byte.

    Raises:
        CheckpointError: a scale is NaN.
    """
    exponents = module.numbers(scales).reshape(-1, 1)
    broken = int((exponents == _NAN).sum())
    if broken:
        module.fail(f"{module.name}{scales} holds NaN, {broken} of its {exponents.size} values")
    pairs = module.numbers(codes).reshape(-1, GROUP // 2)
    values = np.empty((pairs.shape[0], GROUP), np.uint8)
    values[:, ::2] = pairs & 15
    values[:, 1::2] = pairs >> 4
    return np.concatenate((exponents, values[:, :16] | values[:, 16:] << 4), axis=1), None
