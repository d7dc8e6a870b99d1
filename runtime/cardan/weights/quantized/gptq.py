"""Linears as GPTQ tools store them.

``qweight`` int32 ``[in * bits / 32, out]``, ``qzeros`` int32 ``[groups, out * bits / 32]``, ``scales``
``[groups, out]``, ``g_idx`` int32 ``[in]``: the group of each column. A value is ``scale * (code - zero)``; the first
version of the format stores zeros less 1, in their bits: the zero 0 as the largest code.
Source: the format of Frantar et al., "GPTQ: Accurate Post-Training Quantization", as its checkpoints have it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from cardan.errors import CheckpointError
from cardan.types import Int32Array
from cardan.weights.quantized.codes import Bytes, rows_of_words, unpack_words
from cardan.weights.quantized.grouped import affine_blocks, grouped_format, in_order, order_of, symmetric_blocks
from cardan.weights.quantized.module import SCALES, Entry, Groups, Module, Packed, groups_of
from cardan.weights.quantized.reader import Reader
from cardan.weights.quantized.settings import ModuleNames, Settings, compiled

BITS = (4, 8)
VERSIONS = ("gptq", "gptq_v2")


@dataclass(frozen=True, slots=True)
class _Kind:
    """How linears are quantized.

    Attributes:
        bits: of a code.
        group: columns that share a scale; -1 for all.
        symmetric: zeros are the middle of the codes.
        act_order: columns were quantized in another order, so that neighbours have different groups.
    """

    bits: int
    group: int
    symmetric: bool
    act_order: bool


class GptqReader(Reader):
    """GPTQ with the settings of one checkpoint."""

    codes = (".qweight",)
    parts = (".qzeros", ".scales", ".g_idx")

    def __init__(self, settings: Settings) -> None:
        """Read them.

        Raises:
            CheckpointError: they are of a kind that Cardan does not read.
        """
        self._kind = _kind(settings, None)
        self._first_version = settings.text("checkpoint_format", VERSIONS, "gptq") == "gptq"
        self._left_out = ModuleNames(settings.names("modules_to_not_convert"), "modules_to_not_convert")
        self._rules = _rules(settings, self._kind)
        kind = self._kind
        zeros = "symmetric" if kind.symmetric else "with zero points"
        group = "a scale for each row" if kind.group == -1 else f"groups of {kind.group}"
        order = ", columns in act-order" if kind.act_order else ""
        self.summary = f"GPTQ, {kind.bits} bits {zeros}, {group}{order}"

    def takes(self, module: str, suffix: str, entry: Entry) -> bool:
        """All but what the config leaves out."""
        return module not in self._left_out and self._kind_of(module) is not None

    def describe(self, module: Module) -> Packed:
        """See ``Reader.describe``."""
        kind = self._kind_of(module.name)
        assert kind is not None, "only modules that are taken are described"
        words, rows = module.matrix(".qweight", ("I32",))
        groups = groups_of(module, rows, words * 32 // kind.bits, kind.group)
        if rows * kind.bits % 32:
            module.fail(f"{rows} zero points of {kind.bits} bits do not fill words of 32")
        module.require(".qzeros", ("I32",), (groups.count, rows * kind.bits // 32))
        scale, _ = module.require(".scales", SCALES, (groups.count, rows))
        if kind.act_order or ".g_idx" in module.entries:
            module.require(".g_idx", ("I32",), (groups.columns,))
        fmt = grouped_format(groups, kind.bits, scale, symmetric=kind.symmetric)
        return Packed(fmt, (rows, groups.columns), partial(self._blocks, module, groups, kind))

    def _kind_of(self, module: str) -> _Kind | None:
        return next((kind for pattern, kind in self._rules if pattern.match(module)), self._kind)

    def _blocks(self, module: Module, groups: Groups, kind: _Kind) -> tuple[Bytes, Int32Array | None]:
        order = order_of(module, ".g_idx", groups) if ".g_idx" in module.entries else None
        codes = in_order(rows_of_words(module.numbers(".qweight")), kind.bits, order)
        zeros = unpack_words(module.numbers(".qzeros"), kind.bits).T
        if self._first_version:
            zeros = zeros + np.uint8(1) & np.uint8(2**kind.bits - 1)
        values = module.floats(".scales")
        if not kind.symmetric:
            return affine_blocks(groups, codes, np.ascontiguousarray(values.T), zeros), order
        middle = 2 ** (kind.bits - 1)
        if (zeros != middle).any():
            module.fail(
                f"the config says that it is symmetric, but its zero points are {zeros.min()} to {zeros.max()} "
                f"instead of {middle}",
                'Set "sym" to false in its quantization_config, or fetch the checkpoint again.',
            )
        return symmetric_blocks(groups, kind.bits, codes, module.numbers(".scales").T), order


def _kind(settings: Settings, base: _Kind | None) -> _Kind:
    return _Kind(
        settings.whole("bits", BITS, None if base is None else base.bits),
        settings.whole("group_size", default=128 if base is None else base.group),
        settings.flag("sym", True if base is None else base.symmetric),
        settings.flag("desc_act", False if base is None else base.act_order),
    )


def _rules(settings: Settings, base: _Kind) -> tuple[tuple[re.Pattern[str], _Kind | None], ...]:
    """Modules with settings of their own: patterns that begin with ``-:`` are left out, others change some."""
    dynamic: Mapping[str, Any] = settings.part("dynamic").values
    rules: list[tuple[re.Pattern[str], _Kind | None]] = []
    for pattern, changes in dynamic.items():
        kind: _Kind | None = None
        if not pattern.startswith("-:"):
            if not isinstance(changes, Mapping):
                raise CheckpointError(
                    f"config.json: quantization_config.dynamic of {pattern!r} must be an object, got {changes!r}. "
                    "Fetch the config again."
                )
            kind = _kind(Settings(changes, f"quantization_config.dynamic of {pattern!r}"), replace(base))
        rules.append((compiled(pattern.removeprefix("-:").removeprefix("+:"), "quantization_config.dynamic"), kind))
    return tuple(rules)
