"""Linears over quantized weights, as MLX multiplies them: packed integers with a scale and a bias for each group.

It knows no model. Bytes of block formats are turned into this form by ``cardan_mlx.repacking``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from cardan.errors import UnsupportedError
from cardan.platform import LinearMethod, LinearSpec, PackedWeight
from cardan.types import TensorView
from cardan_mlx.arrays import DENSE_FORMATS, dense_array, mlx_dtype
from cardan_mlx.linear import check_rows
from cardan_mlx.repacking import AFFINE_BITS, AFFINE_GROUPS, CONVERTERS, pack_codes, to_affine

MADE_AT_LOAD = {"mlx_q4": 4, "mlx_q8": 8}
"""Formats that dense weights are quantized to at load, and their bits."""

MADE_GROUP = 64
"""Group of the formats made at load; rows that do not divide by it take 32."""

AFFINE_PREFIX = "AFFINE"
"""Formats ``AFFINE<bits>_<group>_<scale type>`` are checkpoints' own affine groups."""

ELEMENTS_AT_ONCE = 1 << 22
"""Elements repacked at a time, in whole rows, which bounds what loading takes beside the weights."""


@dataclass(frozen=True, slots=True)
class AffineArrays:
    """One weight in MLX's form.

    Attributes:
        words: uint32 ``[out_features, in_features * bits / 32]``.
        scales: ``[out_features, in_features / group]``.
        biases: as ``scales``.
        bits: of a code.
        group: columns that share a scale.
    """

    words: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group: int


class AffineWeight(PackedWeight):
    """A quantized weight.

    Activations are brought to the type of the scales, so that scales stay exact. That is float32, or where MLX adds
    up products in float32 whatever their type, the activations' own type if it holds every scale.

    Attributes:
        arrays: the weight.
        bias: ``[out_features]`` in float32, or None.
    """

    def __init__(self, arrays: AffineArrays, bias: mx.array | None, dtype: mx.Dtype) -> None:
        """Hold a weight; ``dtype`` is the type of the activations, and of what ``gather`` gives."""
        self.arrays = arrays
        self.bias = bias
        self._dtype = dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales, biases and the linear's own bias."""
        arrays = self.arrays
        held = (arrays.words, arrays.scales, arrays.biases, *(() if self.bias is None else (self.bias,)))
        return sum(int(array.nbytes) for array in held)

    def apply(self, x: mx.array) -> mx.array:
        """See ``PackedWeight.apply``."""
        arrays = self.arrays
        out = mx.quantized_matmul(
            x.astype(arrays.scales.dtype),
            arrays.words,
            scales=arrays.scales,
            biases=arrays.biases,
            transpose=True,
            group_size=arrays.group,
            bits=arrays.bits,
        )
        if self.bias is not None:
            out = out + self.bias
        return out.astype(x.dtype)

    def gather(self, ids: mx.array) -> mx.array:
        """See ``PackedWeight.gather``."""
        arrays = self.arrays
        words, scales, biases = (mx.take(array, ids, axis=0) for array in (arrays.words, arrays.scales, arrays.biases))
        rows = mx.dequantize(words, scales, biases, group_size=arrays.group, bits=arrays.bits)
        return rows.astype(self._dtype)

    def dequantized(self) -> mx.array:
        """The whole weight in the type of its scales: ``[out_features, in_features]``."""
        arrays = self.arrays
        return mx.dequantize(arrays.words, arrays.scales, arrays.biases, group_size=arrays.group, bits=arrays.bits)


class AffineLinear(LinearMethod):
    """``mx.quantized_matmul`` over GGUF's block formats, MLX's own groups, and weights quantized at load."""

    name = "affine"

    def __init__(self, *, sums_in_float32: bool) -> None:
        """Make it.

        Args:
            sums_in_float32: whether MLX adds up products of halves in float32, as on Metal. Its CPU build adds them up
                in the type of the scales, where a sum of 4,096 and 1 may stay 4,096; scales are float32 there.
        """
        self._sums_in_float32 = sums_in_float32

    def claims(self, fmt: str, spec: LinearSpec) -> str | None:
        """See ``LinearMethod.claims``."""
        if spec.quantize is not None:
            return self._claims_dense(fmt, spec)
        if fmt in CONVERTERS:
            return None
        affine = parse_affine(fmt)
        if affine is None:
            return f"{fmt} is none of {', '.join(CONVERTERS)} or affine groups"
        if spec.in_features % affine.group:
            return f"rows of {spec.in_features} are no multiple of its groups of {affine.group}"
        return None

    def _claims_dense(self, fmt: str, spec: LinearSpec) -> str | None:
        if spec.quantize not in MADE_AT_LOAD:
            return f"{spec.quantize} is none of {', '.join(MADE_AT_LOAD)}"
        if fmt not in DENSE_FORMATS:
            return f"{fmt} is dequantized first, since {spec.quantize} was asked for"
        if spec.in_features % 32:
            return f"rows of {spec.in_features} are no multiple of 32, so {spec.name} stays dense"
        return None

    def pack(self, views: Sequence[TensorView], spec: LinearSpec, bias: mx.array | None) -> PackedWeight:
        """Repack, quantize or take over the rows of ``views``.

        Raises:
            UnsupportedError: a view has another format, or the views do not fit.
        """
        for view in views:
            reason = self.claims(view.dtype, spec)
            if reason is not None:
                raise UnsupportedError(f"{view.name} cannot be packed for {spec.name}: {reason}. Widen it first.")
        check_rows(spec, sum(view.num_elements // spec.in_features for view in views))
        narrow = mlx_dtype(spec.dtype) if self._sums_in_float32 else mx.float32
        arrays = _joined((part for view in views for part in _parts(view, spec, narrow)), spec.out_features)
        return AffineWeight(arrays, None if bias is None else bias.astype(mx.float32), mlx_dtype(spec.dtype))


def _parts(view: TensorView, spec: LinearSpec, narrow: mx.Dtype) -> Iterator[AffineArrays]:
    """The view's rows in MLX's form, ``ELEMENTS_AT_ONCE`` at a time; scales are ``narrow`` where that is exact."""
    rows = view.num_elements // spec.in_features
    row_bytes = len(view.data) // max(rows, 1)
    step = max(1, ELEMENTS_AT_ONCE // spec.in_features)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        data = view.data[first * row_bytes : (first + count) * row_bytes]
        yield _affine_of(TensorView(view.name, view.dtype, (count, spec.in_features), data), spec.quantize, narrow)


def _affine_of(view: TensorView, quantize: str | None, narrow: mx.Dtype) -> AffineArrays:
    if quantize is not None:
        return _quantized(view, MADE_AT_LOAD[quantize])
    own = parse_affine(view.dtype)
    if own is not None:
        return own.arrays(view, narrow)
    rows, columns = view.shape
    affine = to_affine(view.dtype, view.data, rows, columns)
    scales, biases = mx.array(affine.scales), mx.array(affine.biases)
    if narrow == mx.float16 and view.dtype in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        scales, biases = _as_float16(scales, biases)
    arrays = AffineArrays(mx.array(pack_codes(affine.codes, affine.bits)), scales, biases, affine.bits, affine.group)
    mx.eval(arrays.words, scales, biases)
    return arrays


def _as_float16(scales: mx.array, biases: mx.array) -> tuple[mx.array, mx.array]:
    """Halves where they hold every scale and bias exactly, else what was given."""
    narrow = scales.astype(mx.float16), biases.astype(mx.float16)
    exact = [
        (part.astype(mx.float32) == wide).all().item() for part, wide in zip(narrow, (scales, biases), strict=True)
    ]
    return narrow if all(exact) else (scales, biases)


def _quantized(view: TensorView, bits: int) -> AffineArrays:
    group = MADE_GROUP if view.shape[-1] % MADE_GROUP == 0 else 32
    # float32 whatever the activations are: they, and not the scales, are rounded to the type of the activations
    words, scales, biases = mx.quantize(dense_array(view).astype(mx.float32), group_size=group, bits=bits)
    mx.eval(words, scales, biases)
    return AffineArrays(words, scales, biases, bits, group)


def _joined(parts: Iterator[AffineArrays], rows: int) -> AffineArrays:
    """Parts of one format, their rows one below the other; scales that differ in type become float32.

    Each part is written to its place before the next is made, so that one or two are held beside the whole.
    """
    part = next(parts)
    first = part.words.shape[0]
    if first == rows:
        return part
    words, scales, biases = (_with_rows(array, rows) for array in (part.words, part.scales, part.biases))
    for part in parts:
        last = first + part.words.shape[0]
        if part.scales.dtype != scales.dtype:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        for whole, piece in ((words, part.words), (scales, part.scales), (biases, part.biases)):
            whole[first:last] = piece.astype(whole.dtype)
        mx.eval(words, scales, biases)
        first = last
    return AffineArrays(words, scales, biases, part.bits, part.group)


def _with_rows(array: mx.array, rows: int) -> mx.array:
    """``rows`` rows that begin with those of ``array``; memory is reused when further ones are written."""
    whole = mx.zeros((rows, array.shape[1]), dtype=array.dtype)
    whole[: array.shape[0]] = array
    mx.eval(whole)
    return whole


@dataclass(frozen=True, slots=True)
class AffineFormat:
    """A checkpoint's own affine groups: each group is a scale, a bias, and its packed codes.

    Attributes:
        bits: of a code.
        group: columns that share a scale.
        scale: format of scales and biases, ``F32``, ``F16`` or ``BF16``.
    """

    bits: int
    group: int
    scale: str

    def arrays(self, view: TensorView, dtype: mx.Dtype) -> AffineArrays:
        """The view's rows in MLX's form; scales of another type than the activations' ``dtype`` become float32."""
        rows, columns = view.shape
        groups, width = columns // self.group, 4 if self.scale == "F32" else 2
        blocks = np.frombuffer(view.data, dtype=np.uint8).reshape(rows, groups, -1)
        scales, biases = (
            dense_array(
                TensorView(
                    view.name, self.scale, (rows, groups), np.ascontiguousarray(blocks[:, :, at]).reshape(-1).data
                )
            )
            for at in (slice(0, width), slice(width, 2 * width))
        )
        words = mx.array(np.ascontiguousarray(blocks[:, :, 2 * width :]).reshape(rows, -1).view("<u4"))
        if scales.dtype != dtype:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        mx.eval(words, scales, biases)
        return AffineArrays(words, scales, biases, self.bits, self.group)


def parse_affine(fmt: str) -> AffineFormat | None:
    """What ``AFFINE4_64_BF16`` says, or None for other formats and for bits and groups that are not claimed."""
    bits, _, rest = fmt.removeprefix(AFFINE_PREFIX).partition("_")
    group, _, scale = rest.partition("_")
    if not fmt.startswith(AFFINE_PREFIX) or not (bits.isdigit() and group.isdigit()) or scale not in DENSE_FORMATS:
        return None
    found = AffineFormat(int(bits), int(group), scale)
    return found if found.bits in AFFINE_BITS and found.group in AFFINE_GROUPS else None
