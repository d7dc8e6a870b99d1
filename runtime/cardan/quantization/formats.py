"""Weight formats, described neutrally: how many elements a block holds, in how many bytes, with which scales.

It knows no file type and no GEMM; a platform claims formats by their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cardan.errors import CheckpointError
from cardan.platform import ActivationCodes


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatSpec:
    """One way to store the elements of a tensor.

    Attributes:
        name: as in ``TensorView.dtype``.
        block_elements: consecutive elements of a row that are stored together; 1 for dense formats.
        block_bytes: bytes of one block.
        bits: bits of one stored element, without its share of the scales.
        group: consecutive elements that share a scale; 1 for dense formats.
        symmetric: the value is ``scale * q``; otherwise it is ``scale * q + offset``.
        scale: type of the scales, empty for dense formats.
        packing: where the bits of a block are.
        activations: what the activations of a linear in this format are rounded to before they are multiplied, as part
            of the format's meaning; None where they are multiplied as they are. A platform that does not round, or
            rounds to less, is nearer to the weights' own values; its plan says so.
    """

    name: str
    block_elements: int = 1
    block_bytes: int
    bits: int
    group: int = 1
    symmetric: bool = True
    scale: str = ""
    packing: str = ""
    activations: ActivationCodes | None = None

    @property
    def quantized(self) -> bool:
        """Whether elements come in blocks with scales."""
        return self.block_elements > 1

    @property
    def bits_per_weight(self) -> float:
        """Bits of one element, its share of the scales included."""
        return 8 * self.block_bytes / self.block_elements


def _dense(name: str, num_bytes: int) -> FormatSpec:
    return FormatSpec(name=name, block_bytes=num_bytes, bits=8 * num_bytes)


_NIBBLES = "byte i holds element i in its low and element i + 16 in its high four bits"
_FIFTH_BIT = f"; {_NIBBLES}; bit i of a little-endian 32-bit word before them is the fifth bit of element i"
_CHUNKS = "; chunks of 32 bytes hold two groups of 32, one in the low and one in the high four bits"

_SPECS = (
    _dense("F64", 8),
    _dense("F32", 4),
    _dense("F16", 2),
    _dense("BF16", 2),
    _dense("F8_E4M3", 1),
    _dense("F8_E5M2", 1),
    _dense("I64", 8),
    _dense("I32", 4),
    _dense("I16", 2),
    _dense("I8", 1),
    _dense("U64", 8),
    _dense("U32", 4),
    _dense("U16", 2),
    _dense("U8", 1),
    _dense("BOOL", 1),
    FormatSpec(
        name="Q4_0",
        block_elements=32,
        block_bytes=18,
        bits=4,
        group=32,
        scale="float16",
        packing=f"scale; {_NIBBLES}; stored + 8",
    ),
    FormatSpec(
        name="Q4_1",
        block_elements=32,
        block_bytes=20,
        bits=4,
        group=32,
        symmetric=False,
        scale="float16",
        packing=f"scale, offset; {_NIBBLES}",
    ),
    FormatSpec(
        name="Q5_0",
        block_elements=32,
        block_bytes=22,
        bits=5,
        group=32,
        scale="float16",
        packing=f"scale{_FIFTH_BIT}; stored + 16",
    ),
    FormatSpec(
        name="Q5_1",
        block_elements=32,
        block_bytes=24,
        bits=5,
        group=32,
        symmetric=False,
        scale="float16",
        packing=f"scale, offset{_FIFTH_BIT}",
    ),
    FormatSpec(
        name="Q8_0",
        block_elements=32,
        block_bytes=34,
        bits=8,
        group=32,
        scale="float16",
        packing="scale; 32 signed bytes",
    ),
    FormatSpec(
        name="Q2_K",
        block_elements=256,
        block_bytes=84,
        bits=2,
        group=16,
        symmetric=False,
        scale="uint4 * float16",
        packing="16 bytes of scale and offset nibbles; two times 32 bytes with four planes of 2 bits; scale, offset",
    ),
    FormatSpec(
        name="Q3_K",
        block_elements=256,
        block_bytes=110,
        bits=3,
        group=16,
        scale="int6 * float16",
        packing="32 bytes with one plane of third bits each; as Q2_K; 12 bytes of 6-bit scales; scale",
    ),
    FormatSpec(
        name="Q4_K",
        block_elements=256,
        block_bytes=144,
        bits=4,
        group=32,
        symmetric=False,
        scale="uint6 * float16",
        packing=f"scale, offset; 12 bytes of 6-bit scales and offsets{_CHUNKS}",
    ),
    FormatSpec(
        name="Q5_K",
        block_elements=256,
        block_bytes=176,
        bits=5,
        group=32,
        symmetric=False,
        scale="uint6 * float16",
        packing=f"as Q4_K, with 32 bytes before the chunks whose bit j is the fifth bit of group j{_CHUNKS}",
    ),
    FormatSpec(
        name="Q6_K",
        block_elements=256,
        block_bytes=210,
        bits=6,
        group=16,
        scale="int8 * float16",
        packing="128 bytes of low nibbles; 64 bytes of high bit pairs; 16 signed scales; scale; stored + 32",
    ),
    FormatSpec(
        name="MXFP4",
        block_elements=32,
        block_bytes=17,
        bits=4,
        group=32,
        scale="e8m0",
        packing=f"exponent of a power of two, less 127; {_NIBBLES}; codes are E2M1 floats",
    ),
)

AFFINE_BITS = (4, 8)
AFFINE_GROUPS = (32, 64, 128)
AFFINE_SCALES: Mapping[str, tuple[str, int]] = {"F16": ("float16", 2), "BF16": ("bfloat16", 2), "F32": ("float32", 4)}
"""Types that scales of affine groups have in checkpoints: their name and bytes."""


def affine_format(bits: int, group: int, scale: str) -> str:
    """Name of the format whose blocks are groups with a scale and a bias, such as ``AFFINE4_64_BF16``."""
    return f"AFFINE{bits}_{group}_{scale}"


_AFFINE_SPECS = tuple(
    FormatSpec(
        name=affine_format(bits, group, key),
        block_elements=group,
        block_bytes=2 * num_bytes + group * bits // 8,
        bits=bits,
        group=group,
        symmetric=False,
        scale=scale,
        packing="scale, offset; elements in order, little-endian bits",
    )
    for bits in AFFINE_BITS
    for group in AFFINE_GROUPS
    for key, (scale, num_bytes) in AFFINE_SCALES.items()
)


def integer_format(bits: int, group: int, scale: str) -> str:
    """Name of the format whose blocks are groups with a scale and signed codes, such as ``INT4_128_F16``."""
    return f"INT{bits}_{group}_{scale}"


def float8_format(group: int) -> str:
    """Name of the format whose blocks are groups with a float32 scale and E4M3 codes, such as ``FP8_128_F32``."""
    return f"FP8_{group}_F32"


def rounded_format(group: int) -> str:
    """Name of ``INT8`` groups whose linears round activations to int8, a step for each token."""
    return f"{integer_format(8, group, 'F32')}_A8"


_INTEGER_PACKING = {
    4: "scale; elements in order, little-endian bits; stored + 8",
    8: "scale; signed bytes",
}


def _integer(name: str, bits: int, group: int, key: str, activations: ActivationCodes | None = None) -> FormatSpec:
    scale, num_bytes = AFFINE_SCALES[key]
    return FormatSpec(
        name=name,
        block_elements=group,
        block_bytes=num_bytes + group * bits // 8,
        bits=bits,
        group=group,
        scale=scale,
        packing=_INTEGER_PACKING[bits],
        activations=activations,
    )


_INTEGER_SPECS = (
    *(
        _integer(integer_format(bits, group, key), bits, group, key)
        for bits in AFFINE_BITS
        for group in AFFINE_GROUPS
        for key in AFFINE_SCALES
    ),
    *(
        _integer(rounded_format(group), 8, group, "F32", ActivationCodes(largest=127, group=None))
        for group in AFFINE_GROUPS
    ),
)

_FLOAT8_SPECS = tuple(
    FormatSpec(
        name=float8_format(group),
        block_elements=group,
        block_bytes=4 + group,
        bits=8,
        group=group,
        scale="float32",
        packing="scale; E4M3 floats in order",
    )
    for group in AFFINE_GROUPS
)

FORMATS: Mapping[str, FormatSpec] = {
    spec.name: spec for spec in (*_SPECS, *_AFFINE_SPECS, *_INTEGER_SPECS, *_FLOAT8_SPECS)
}
"""Every format that a checkpoint may hold, by name."""

BLOCK_FORMATS: tuple[str, ...] = tuple(spec.name for spec in _SPECS if spec.quantized)
"""Names of GGUF's formats with blocks."""

AFFINE_FORMATS: tuple[str, ...] = tuple(spec.name for spec in _AFFINE_SPECS)
"""Names of the formats with affine groups."""

INTEGER_FORMATS: tuple[str, ...] = tuple(spec.name for spec in _INTEGER_SPECS)
"""Names of the formats whose groups have a scale and signed codes."""

FLOAT8_FORMATS: tuple[str, ...] = tuple(spec.name for spec in _FLOAT8_SPECS)
"""Names of the formats whose groups have a scale and codes that are floats of 8 bits."""


def format_spec(fmt: str) -> FormatSpec:
    """The description of a format.

    Raises:
        CheckpointError: there is no such format.
    """
    spec = FORMATS.get(fmt)
    if spec is None:
        raise CheckpointError(f"No weight format is called {fmt!r}; known are {', '.join(FORMATS)}.")
    return spec


def row_bytes(fmt: str, columns: int) -> int:
    """Bytes of one row of ``columns`` elements.

    Raises:
        CheckpointError: the format is unknown, or a row does not consist of whole blocks.
    """
    spec = format_spec(fmt)
    if columns % spec.block_elements:
        raise CheckpointError(
            f"{fmt} stores rows in blocks of {spec.block_elements} elements, got rows of {columns}. "
            f"Use a format with smaller blocks for this tensor."
        )
    return columns // spec.block_elements * spec.block_bytes


def tensor_bytes(fmt: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor, ``shape`` outermost dimension first; a scalar has the shape ``()``.

    Raises:
        CheckpointError: the format is unknown, or a row does not consist of whole blocks.
    """
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows * row_bytes(fmt, shape[-1] if shape else 1)
