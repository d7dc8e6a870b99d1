"""Linears as the compressed-tensors library stores them: packed integers, signed bytes, 8-bit and 4-bit floats.

``weight_packed`` int32 ``[out, in * bits / 32]`` with half the range added, or ``weight`` int8 or E4M3 ``[out, in]``;
``weight_scale`` ``[out, groups]`` or one for each row or tensor; ``weight_zero_point``, packed along the first axis
beside packed codes; ``weight_g_idx``, the group of each column.
Source: the library's description of its formats, https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from cardan.errors import CheckpointError
from cardan.quantization import rounded_format
from cardan.types import Float32Array, Int32Array
from cardan.weights.quantized.codes import Bytes, unpack_words
from cardan.weights.quantized.float8 import CODES as FLOAT8
from cardan.weights.quantized.float8 import check_row_scales, float8_weight
from cardan.weights.quantized.grouped import affine_blocks, grouped_format, in_order, order_of, symmetric_blocks
from cardan.weights.quantized.module import SCALES, Entry, Groups, Module, Packed, groups_of
from cardan.weights.quantized.mxfp4 import GROUP, mxfp4_blocks
from cardan.weights.quantized.reader import Reader
from cardan.weights.quantized.settings import ModuleNames, Settings

BITS = (4, 8)
FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized"),
    *("mixed-precision", "dense"),
)
STRATEGIES = ("tensor", "channel", "group", "block")
_TYPES = ("Linear", "Embedding")
_DYNAMIC = ("tensor", "token", "group", "tensor_group")


@dataclass(frozen=True, slots=True)
class _Scheme:
    """How the weights of some modules are quantized.

    Attributes:
        bits: of a code.
        kind: ``int`` or ``float``.
        strategy: what has a scale, one of ``STRATEGIES``.
        group: columns that share a scale; -1 for all.
        block: rows and columns that do, of the strategy ``block``.
        symmetric: there are no zero points.
        rounds: activations are rounded to int8 with a step for each token.
        activations: how activations were rounded when the checkpoint was made, for people; empty for not at all.
    """

    bits: int
    kind: str
    strategy: str
    group: int
    block: tuple[int, int] | None
    symmetric: bool
    rounds: bool
    activations: str

    @property
    def summary(self) -> str:
        """The scheme for people."""
        scales = {"group": f"groups of {self.group}", "block": f"blocks of {list(self.block or ())}"}
        scale = scales.get(self.strategy, f"a scale for each {self.strategy}")
        zeros = "" if self.symmetric else " with zero points"
        activations = ""
        if self.activations:
            how = "part of the format" if self.rounds else "which are multiplied as they are instead"
            activations = f"; made for activations in {self.activations}, {how}"
        return f"{self.kind}{self.bits}{zeros}, {scale}{activations}"


class CompressedReader(Reader):
    """``compressed-tensors`` with the settings of one checkpoint."""

    codes = (".weight_packed", ".weight")
    parts = (
        *(".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx"),
        *(".input_scale", ".input_zero_point", ".input_global_scale"),
    )

    def __init__(self, settings: Settings) -> None:
        """Read them.

        Raises:
            CheckpointError: they are of a kind that Cardan does not read.
        """
        settings.text("format", FORMATS, "dense")
        _check_dense(settings)
        self._left_out = ModuleNames(settings.names("ignore"), "quantization_config.ignore")
        groups = settings.part("config_groups")
        self._schemes: list[tuple[ModuleNames | None, _Scheme]] = []
        for name in groups.values:
            group = groups.part(name)
            group.text("format", FORMATS, "dense")
            targets = group.names("targets")
            plain = not targets or any(target in _TYPES for target in targets)
            self._schemes.append((None if plain else ModuleNames(targets, f"{group.where}.targets"), _scheme(group)))
        if not self._schemes:
            raise settings.refuse("config_groups", "an object with at least one group")
        self.summary = "compressed-tensors, " + " and ".join(scheme.summary for _, scheme in self._schemes)

    def takes(self, module: str, suffix: str, entry: Entry) -> bool:
        """Codes, but for what the config leaves out."""
        return (suffix == ".weight_packed" or entry[0] in ("I8", *FLOAT8)) and module not in self._left_out

    def describe(self, module: Module) -> Packed:
        """See ``Reader.describe``."""
        # named modules come before types of them
        schemes = sorted(self._schemes, key=lambda pair: pair[0] is None)
        scheme = next((scheme for names, scheme in schemes if names is None or module.name in names), None)
        if scheme is None:
            module.fail(
                "no group of quantization_config.config_groups targets it", "Check that config.json belongs to it."
            )
        if ".weight_packed" in module.entries:
            return _mxfp4(module) if scheme.kind == "float" else _packed(module, scheme)
        if module.entries[".weight"][0] in FLOAT8:
            return float8_weight(module, ".weight", ".weight_scale", scheme.block)
        return _bytes(module, scheme)


def _check_dense(settings: Settings) -> None:
    for key in ("sparsity_config", "transform_config"):
        values = settings.part(key).values
        if values and values.get("format", "") != "dense":
            raise CheckpointError(
                f"config.json: quantization_config.{key} is {dict(values)!r}, which Cardan does not read. "
                "Choose a checkpoint without it."
            )


def _scheme(group: Settings) -> _Scheme:
    weights, inputs = group.part("weights"), group.part("input_activations")
    kind = weights.text("type", ("int", "float"), "int")
    block = weights.values.get("block_structure")
    sizes = weights.values.get("group_size")
    strategy = weights.text("strategy", STRATEGIES, "group" if sizes not in (None, -1) else "channel")
    if strategy == "block" and (not isinstance(block, list | tuple) or len(block) != 2):
        raise weights.refuse("block_structure", "two whole numbers")
    rounded = inputs.values.get("num_bits")
    activations = ""
    if rounded is not None:
        dynamic = bool(inputs.values.get("dynamic"))
        strategy_in = inputs.text("strategy", _DYNAMIC, "tensor")
        activations = f"{inputs.text('type', ('int', 'float'), 'int')}{rounded}, "
        activations += f"{'dynamic' if dynamic else 'static'}, a scale for each {strategy_in}"
    bits = weights.whole("num_bits", BITS)
    rounds = kind == "int" and bits == 8 and activations == "int8, dynamic, a scale for each token"
    return _Scheme(
        bits=bits,
        kind=kind,
        strategy=strategy,
        group=weights.whole("group_size") if strategy == "group" else -1,
        block=(int(block[0]), int(block[1])) if strategy == "block" and block else None,
        symmetric=weights.flag("symmetric", True),
        rounds=rounds and inputs.flag("symmetric", True),
        activations=activations,
    )


def _packed(module: Module, scheme: _Scheme) -> Packed:
    rows, words = module.matrix(".weight_packed", ("I32",))
    groups = groups_of(module, rows, words * 32 // scheme.bits, scheme.group)
    module.require(".weight_shape", ("I64", "I32"), (2,))
    if scheme.strategy == "group":
        scale, _ = module.require(".weight_scale", SCALES, (rows, groups.count))
    else:
        check_row_scales(module, ".weight_scale", rows)
        scale, _ = module.require(".weight_scale", SCALES)
    if not scheme.symmetric:
        module.require(".weight_zero_point", ("I32",), (-(-rows * scheme.bits // 32), groups.count))
    if ".weight_g_idx" in module.entries:
        module.require(".weight_g_idx", ("I32",), (groups.columns,))
    fmt = grouped_format(groups, scheme.bits, scale, symmetric=scheme.symmetric)
    return Packed(fmt, (rows, groups.columns), partial(_packed_blocks, module, groups, scheme))


def _packed_blocks(module: Module, groups: Groups, scheme: _Scheme) -> tuple[Bytes, Int32Array | None]:
    said = tuple(int(size) for size in module.numbers(".weight_shape"))
    if said != (groups.rows, groups.columns):
        module.fail(
            f"{module.name}.weight_shape says {list(said)}, but .weight_packed has {[groups.rows, groups.columns]}"
        )
    order = order_of(module, ".weight_g_idx", groups) if ".weight_g_idx" in module.entries else None
    codes = module.numbers(".weight_packed").view(np.uint8)
    codes = in_order(codes.reshape(groups.rows, -1), scheme.bits, order)
    values = module.floats(".weight_scale")
    if scheme.symmetric:
        bits = _each_row(module.numbers(".weight_scale"), groups)
        return symmetric_blocks(groups, scheme.bits, codes, bits), order
    words = np.ascontiguousarray(module.numbers(".weight_zero_point").T)
    zeros = unpack_words(words, scheme.bits)[:, : groups.rows].T
    return affine_blocks(groups, codes, _each_row(values, groups), zeros), order


def _each_row(scales: Float32Array, groups: Groups) -> Float32Array:
    """Scales ``[rows, groups]`` from those, or from one for each row or for all."""
    if scales.size == 1:
        return np.broadcast_to(scales.reshape(1, 1), (groups.rows, groups.count))
    return scales.reshape(groups.rows, groups.count)


def _bytes(module: Module, scheme: _Scheme) -> Packed:
    """Signed bytes with a scale for each row or group, and with zero points where they have them."""
    rows, columns = module.matrix(".weight", ("I8",))
    if scheme.bits != 8 or scheme.kind != "int":
        module.fail(f"the config says {scheme.kind}{scheme.bits}, but its weight is I8", "Fetch the checkpoint again.")
    groups = groups_of(module, rows, columns, scheme.group)
    if scheme.strategy == "group":
        module.require(".weight_scale", SCALES, (rows, groups.count))
    else:
        check_row_scales(module, ".weight_scale", rows)
    scale, _ = module.require(".weight_scale", SCALES)
    if not scheme.symmetric:
        shape = module.require(".weight_zero_point", ("I8",))[1]
        if int(np.prod(shape)) not in (1, rows * groups.count):
            module.fail(f"{module.name}.weight_zero_point has shape {list(shape)}, expected one for each scale")
    fmt = grouped_format(groups, 8, scale, symmetric=scheme.symmetric)
    if scheme.symmetric and scheme.rounds:
        fmt = rounded_format(groups.block)
    return Packed(fmt, (rows, columns), partial(_bytes_blocks, module, groups, scheme))


def _bytes_blocks(module: Module, groups: Groups, scheme: _Scheme) -> tuple[Bytes, Int32Array | None]:
    codes = module.numbers(".weight").view(np.uint8) ^ np.uint8(0x80)
    values = _each_row(module.floats(".weight_scale"), groups)
    if not scheme.symmetric:
        zeros = _each_row(module.numbers(".weight_zero_point").astype(np.float32) + np.float32(128), groups)
        return affine_blocks(groups, codes, values, zeros), None
    scales = values if scheme.rounds else _each_row(module.numbers(".weight_scale"), groups)
    return symmetric_blocks(groups, 8, codes, scales), None


def _mxfp4(module: Module) -> Packed:
    rows, pairs = module.matrix(".weight_packed", ("U8",))
    columns = 2 * pairs
    if columns % GROUP:
        module.fail(f"groups of {GROUP} do not divide its rows of {columns}")
    module.require(".weight_scale", ("U8",), (rows, columns // GROUP))
    return Packed("MXFP4", (rows, columns), partial(mxfp4_blocks, module, ".weight_packed", ".weight_scale"))
