"""Linears by the native kernels, over every format of ``cardan.quantization`` that holds weights, as it is.

It knows no format: which there are, how they lie in memory and how they are multiplied is the native module's affair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cardan.errors import UnsupportedError
from cardan.platform import ActivationCodes, LinearMethod, LinearSpec, PackedWeight
from cardan.quantization import FLOAT8_FORMATS, format_spec
from cardan.types import Array, TensorView
from cardan_cpu.native_crossovers import default_crossovers

ROUNDINGS = ("float", "int16", "int8")
"""What activations are rounded to where weights are quantized, each 32 of them by their largest magnitude.

``float`` does not round, ``int16`` is off by 1/65,278 of that magnitude at most, ``int8`` by 1/254.
"""

ACTIVATIONS = ("auto", *ROUNDINGS)
"""Choices of a user: ``auto`` takes ``float`` for float32 activations, and ``int16`` for narrower ones, which are
rounded to fewer bits anyway."""

_LARGEST_CODES = {"int16": 127 * 256 + 127, "int8": 127}
"""Of a group's largest magnitude; int16 is two planes of int8."""
_CODE_GROUP = 32


class NativeWeight(PackedWeight):
    """A weight in panels of the native module.

    Attributes:
        packed: the module's ``PackedLinear``.
    """

    def __init__(self, native: Any, packed: Any) -> None:
        """Hold ``packed``, which the module ``native`` made."""
        self._native = native
        self.packed = packed

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""
        return int(self.packed.num_bytes)

    def apply(self, x: Array) -> Array:
        """See ``PackedWeight.apply``."""
        return self._native.linear(x, self.packed)

    def apply_add(self, x: Array, residual: Array) -> Array:
        """``residual + apply(x)``, rounded once."""
        return self._native.linear_add(x, self.packed, residual)

    def apply_float32(self, x: Array) -> Array:
        """``apply(x)`` in float32, whatever the type of ``x``."""
        return self._native.linear_float32(x, self.packed)

    def gather(self, ids: Array) -> Array:
        """See ``PackedWeight.gather``."""
        return self._native.gather_rows(self.packed, ids)


class NativeLinear(LinearMethod):
    """GEMMs of the native module.

    Attributes:
        activations: a member of ``ACTIVATIONS``; dense weights are always multiplied by activations as they are.
    """

    name = "native"

    def __init__(
        self, native: Any, activations: str = ACTIVATIONS[0], crossovers: Mapping[str, int] | None = None
    ) -> None:
        """Take the kernels of a loaded variant.

        Args:
            native: the variant.
            activations: a member of ``ACTIVATIONS``.
            crossovers: numbers of rows at which kernels change, by name; others are those of the package.

        Raises:
            UnsupportedError: ``activations`` is none of ``ACTIVATIONS``.
        """
        if activations not in ACTIVATIONS:
            raise UnsupportedError(f"activations must be one of {', '.join(ACTIVATIONS)}, got {activations!r}.")
        self._native = native
        self._formats = frozenset(native.packable_formats())
        self.activations = activations
        self.crossovers = {**default_crossovers(native.VARIANT), **(crossovers or {})}

    @property
    def formats(self) -> frozenset[str]:
        """Names of the formats that are taken."""
        return self._formats

    def claims(self, fmt: str, spec: LinearSpec) -> str | None:
        """See ``LinearMethod.claims``; formats are taken as they are, and nothing is quantized at load."""
        if spec.quantize is not None:
            return f"weights are not quantized at load here, and {spec.quantize} was asked for"
        if fmt not in self._formats:
            return f"{fmt} is none of {', '.join(sorted(self._formats))}"
        block = format_spec(fmt).block_elements
        if spec.in_features % block:
            return f"rows of {spec.in_features} are no whole blocks of {block}"
        return None

    def rounding(self, spec: LinearSpec) -> str:
        """What activations of a linear are rounded to where its weight is quantized, a member of ``ROUNDINGS``."""
        if self.activations != "auto":
            return self.activations
        return "float" if spec.dtype == "float32" else "int16"

    def activation_codes(self, fmt: str, spec: LinearSpec) -> ActivationCodes | None:
        """See ``LinearMethod.activation_codes``."""
        largest = _LARGEST_CODES.get(self.rounding(spec))
        floats = format_spec(fmt).block_elements == 1 or fmt in FLOAT8_FORMATS
        return None if largest is None or floats else ActivationCodes(largest, _CODE_GROUP)

    def pack(self, views: Sequence[TensorView], spec: LinearSpec, bias: Array | None) -> PackedWeight:
        """Rearrange the rows of ``views`` into panels; their bytes are read where they lie.

        F32 weights are rounded to a narrower type of activations; all other formats stay exact.

        Raises:
            UnsupportedError: a view cannot be taken, formats differ, or rows are missing.
        """
        parts, rows, formats = [], [], []
        for view in views:  # once: the sequence may make each view as it is looked at
            reason = self.claims(view.dtype, spec)
            if reason is not None:
                raise UnsupportedError(f"{view.name} cannot be packed for {spec.name}: {reason}. Widen it first.")
            formats.append(view.dtype)
            parts.append(np.frombuffer(view.data, dtype=np.uint8))
            rows.append(view.num_elements // spec.in_features)
        if len(set(formats)) != 1:
            raise UnsupportedError(f"{spec.name} has tensors of {', '.join(formats)}. Pack one format at a time.")
        if sum(rows) != spec.out_features:
            raise UnsupportedError(
                f"{spec.name} needs {spec.out_features} rows, but its tensors have {sum(rows)}. "
                "Check the model's config."
            )
        packed = self._native.pack_linear(
            formats[0], parts, rows, spec.in_features, spec.dtype, bias, self.rounding(spec), self.crossovers
        )
        return NativeWeight(self._native, packed)
