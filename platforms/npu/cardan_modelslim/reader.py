"""Linears as ModelSlim stores them: signed bytes with a scale for each row, and steps of activations in some.

``quant_model_description.json`` names the type of every tensor. ``weight`` int8 ``[out, in]``. W8A8_DYNAMIC and W8A16:
``weight_scale`` and ``weight_offset``, one for each row or group; the value is ``(code - offset) * scale``. W8A8, of
one step for all activations: ``input_scale``, ``input_offset``, ``deq_scale``, float32 or the bits of float32 in int64,
which is the product of the two scales, and ``quant_bias`` int32, which is computed from them, the codes and the bias:
``round(bias / deq_scale - input_offset * sum of the codes)``. It is computed again here, and must be as it says.

Source: the documentation of msmodelslim, ascendv1.md and quantized_weight_format.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cardan.errors import CheckpointError
from cardan.quantization import ActivationStep, affine_format, integer_format, rounded_format
from cardan.types import Float32Array, Int32Array
from cardan.weights.quantized import SCALES, SETTINGS, Entry, Groups, Module, Packed, Reader, Settings, groups_of

DESCRIPTION = "quant_model_description.json"
FLOAT = "FLOAT"
STATIC, DYNAMIC, WEIGHTS_ONLY = "W8A8", "W8A8_DYNAMIC", "W8A16"
BFLOAT16, FLOAT32 = 2.0**-8, 2.0**-24
"""What the types round by that a bias, scales and their quotient may go through."""
READ = (STATIC, DYNAMIC, WEIGHTS_ONLY)
_CHOOSE = "Choose a checkpoint of W8A8, W8A8_DYNAMIC or W8A16, or one that is not quantized."


class ModelSlimReader(Reader):
    """The types of one checkpoint's tensors."""

    codes = (".weight",)
    parts = (
        *(".weight_scale", ".weight_offset"),
        *(".input_scale", ".input_offset", ".deq_scale", ".quant_bias"),
    )
    beside = (".bias",)

    def __init__(self, settings: Settings) -> None:
        """Read the description.

        Raises:
            CheckpointError: there is none, or it names a type that Cardan does not read.
        """
        description = settings.values.get(SETTINGS)
        if not isinstance(description, Mapping):
            raise CheckpointError(f"The checkpoint has no {DESCRIPTION} beside config.json. Fetch it again, whole.")
        self._types = {name: str(kind) for name, kind in description.items() if name.endswith(".weight")}
        found = sorted({kind for kind in self._types.values() if kind != FLOAT})
        unknown = [kind for kind in found if kind not in READ]
        if unknown:
            example = next(name for name, kind in self._types.items() if kind == unknown[0])
            raise CheckpointError(
                f"{DESCRIPTION}: {example} is {unknown[0]}, and of ModelSlim's types Cardan reads {', '.join(READ)} "
                f"and {FLOAT}. {_CHOOSE}"
            )
        _check_rest(description)
        self._group = _group_size(description)
        steps = "; W8A8 has one step for all activations: on NPUs it is the checkpoint's" if STATIC in found else ""
        self.summary = f"ModelSlim {' and '.join(found) or FLOAT}{steps}"

    def takes(self, module: str, suffix: str, entry: Entry) -> bool:
        """Codes, by the description.

        Raises:
            CheckpointError: a tensor holds codes of which the description says nothing.
        """
        name = module + suffix
        kind = self._types.get(name)
        if kind in (None, FLOAT) and entry[0] == "I8":
            said = "does not name it" if kind is None else f"says that it is {FLOAT}"
            raise CheckpointError(f"{name} holds codes of int8, and {DESCRIPTION} {said}. Fetch the checkpoint again.")
        return kind not in (None, FLOAT)

    def describe(self, module: Module) -> Packed:
        """See ``Reader.describe``."""
        kind = self._types[f"{module.name}.weight"]
        rows, columns = module.matrix(".weight", ("I8",))
        if kind == STATIC:
            groups = groups_of(module, rows, columns, -1)
            module.require(".input_scale", SCALES)
            module.require(".input_offset", (*SCALES, "I8"))
            module.require(".deq_scale", ("F32", "I64"), (rows,))
            module.require(".quant_bias", ("I32",), (rows,))
            blocks = partial(_static_blocks, module, groups)
            return Packed(rounded_format(groups.block), (rows, columns), blocks, partial(_static_step, module))
        scales = module.require(".weight_scale", SCALES)[1]
        per_row = int(np.prod(scales)) // rows
        if int(np.prod(scales)) != per_row * rows or per_row < 1 or columns % per_row:
            module.fail(f"{module.name}.weight_scale has shape {list(scales)}, expected one or several for each row")
        if self._group and per_row > 1 and columns // per_row != self._group:
            found = f"{module.name}.weight_scale has one scale for each {columns // per_row} columns"
            module.fail(f"{found}, and {DESCRIPTION} says group_size {self._group}")
        if ".weight_offset" in module.entries:
            module.require(".weight_offset", (*SCALES, "I8"), scales)
        groups = groups_of(module, rows, columns, columns // per_row)
        if _has_offsets(module):
            fmt = affine_format(8, groups.block, "F32")
            return Packed(fmt, (rows, columns), partial(_offset_blocks, module, groups))
        rounds = kind == DYNAMIC
        fmt = rounded_format(groups.block) if rounds else integer_format(8, groups.block, "F32")
        return Packed(fmt, (rows, columns), partial(_plain_blocks, module, groups))


def _group_size(description: Mapping[str, Any]) -> int:
    """Columns that share a scale where rows have several; 0 where the description does not say.

    Raises:
        CheckpointError: it says no whole number.
    """
    size = description.get("group_size")
    if size is None:
        return 0
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise CheckpointError(f"{DESCRIPTION}: group_size must be a whole number from 0 on, got {size!r}. {_CHOOSE}")
    return size


def _check_rest(description: Mapping[str, Any]) -> None:
    """Refuse what changes the model beside its linears.

    Raises:
        CheckpointError: norms have got biases, or keys and values are quantized.
    """
    shifted = next((name for name in description if name.endswith(("norm.bias", "norm.module.bias"))), None)
    if shifted is not None:
        raise CheckpointError(f"{DESCRIPTION}: {shifted} is a bias that smoothing gave a norm. {_CHOOSE}")
    kv = description.get("kv_quant_type") or description.get("kv_cache_type")
    if kv not in (None, "", FLOAT):
        raise CheckpointError(f"{DESCRIPTION}: keys and values are {kv}, which Cardan does not read. {_CHOOSE}")


def _has_offsets(module: Module) -> bool:
    return ".weight_offset" in module.entries and bool((module.floats(".weight_offset") != 0).any())


def _plain_blocks(module: Module, groups: Groups) -> tuple[Any, Int32Array | None]:
    scales = module.floats(".weight_scale").reshape(groups.rows, groups.count)
    return groups.joined(module.numbers(".weight").view(np.uint8), groups.blocks(scales)), None


def _offset_blocks(module: Module, groups: Groups) -> tuple[Any, Int32Array | None]:
    """``(code - offset) * scale`` with codes from 0 on, as affine groups have them."""
    scales = module.floats(".weight_scale").reshape(groups.rows, groups.count)
    offsets = module.floats(".weight_offset").reshape(groups.rows, groups.count)
    codes = module.numbers(".weight").view(np.uint8) ^ np.uint8(0x80)
    shifts = -(scales * (offsets + np.float32(128)))
    return groups.joined(codes, groups.blocks(scales), groups.blocks(shifts)), None


def _static_blocks(module: Module, groups: Groups) -> tuple[Any, Int32Array | None]:
    """Weights of which the description has only the product of their scale and that of activations."""
    products, codes = _products(module), module.numbers(".weight")
    _check_quant_bias(module, codes, products)
    scales = products / _input_scale(module)
    return groups.joined(codes.view(np.uint8), groups.blocks(scales[:, None])), None


def _check_quant_bias(module: Module, codes: npt.NDArray[np.int8], products: Float32Array) -> None:
    """Hold ``quant_bias`` to what it is computed from, within what bfloat16 and float32 round there.

    Raises:
        CheckpointError: it is something else, such as the only place of a bias.
    """
    shift = -float(_static_step(module).zero) * codes.sum(axis=1, dtype=np.int64)
    biased = ".bias" in module.entries
    bias = module.floats(".bias").astype(np.float64) if biased else np.zeros(len(codes))
    share = np.divide(bias, products, out=np.zeros(len(codes)), where=products != 0)
    slack = 1 + 2 * BFLOAT16 * np.abs(share) + 2 * FLOAT32 * (np.abs(shift) + np.abs(share))
    held = module.numbers(".quant_bias")
    off = np.abs(held - (share + shift)) > slack
    wrong = np.flatnonzero(off & (products != 0))
    if wrong.size:
        row = int(wrong[0])
        stored, made = f"{module.name}.quant_bias is {held[row]} in row {row}", f"{share[row] + shift[row]:.0f} is what"
        if biased:
            module.fail(f"{stored}, {made} its bias, codes and input_offset make")
        module.fail(
            f"{stored}, {made} its codes and input_offset make", f"A bias may be in it that is not beside it. {_CHOOSE}"
        )


def _input_scale(module: Module) -> np.float32:
    step = module.floats(".input_scale").reshape(-1)
    if step.size != 1 or not 0 < step[0] < np.inf:
        module.fail(f"{module.name}.input_scale must be one positive number, got {step[:4].tolist()}")
    return np.float32(step[0])


def _static_step(module: Module) -> ActivationStep:
    """The calibrated step of activations: codes are ``round(x / input_scale) + input_offset``."""
    suffix = ".input_offset"
    integers = module.entries[suffix][0] == "I8"
    zeros = (module.numbers(suffix) if integers else module.floats(suffix)).reshape(-1)
    if zeros.size != 1 or not -128 <= zeros[0] <= 127 or zeros[0] != np.round(zeros[0]):
        module.fail(f"{module.name}.input_offset must be one whole number of -128 .. 127, got {zeros[:4].tolist()}")
    return ActivationStep(float(_input_scale(module)), int(zeros[0]))


def _products(module: Module) -> Float32Array:
    """``deq_scale`` as float32; in int64 its bits stand in the low half."""
    if module.entries[".deq_scale"][0] == "F32":
        return module.floats(".deq_scale")
    bits = module.numbers(".deq_scale").astype(np.uint64) & np.uint64(0xFFFFFFFF)
    values: Float32Array = bits.astype(np.uint32).view(np.float32)
    if not np.isfinite(values).all():
        module.fail(f"{module.name}.deq_scale holds NaN or infinity")
    return values
