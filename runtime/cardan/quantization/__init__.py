"""Neutral descriptions of weight formats, their exact values, and a plain writer for some of them.

It knows no file type, no model and no GEMM: GEMMs belong to platforms, which claim formats by name.
"""

from cardan.quantization.calibrated import ActivationStep, CalibratedView, activation_step
from cardan.quantization.dequantization import dequantize
from cardan.quantization.formats import (
    AFFINE_BITS,
    AFFINE_FORMATS,
    AFFINE_GROUPS,
    AFFINE_SCALES,
    BLOCK_FORMATS,
    FLOAT8_FORMATS,
    FORMATS,
    INTEGER_FORMATS,
    FormatSpec,
    affine_format,
    float8_format,
    format_spec,
    integer_format,
    rounded_format,
    row_bytes,
    tensor_bytes,
)
from cardan.quantization.quantizing import WRITABLE_FORMATS, quantize
from cardan.quantization.rows import gather_rows, slice_rows

__all__ = [
    "AFFINE_BITS",
    "AFFINE_FORMATS",
    "AFFINE_GROUPS",
    "AFFINE_SCALES",
    "BLOCK_FORMATS",
    "FLOAT8_FORMATS",
    "FORMATS",
    "INTEGER_FORMATS",
    "WRITABLE_FORMATS",
    "ActivationStep",
    "CalibratedView",
    "FormatSpec",
    "activation_step",
    "affine_format",
    "dequantize",
    "float8_format",
    "format_spec",
    "gather_rows",
    "integer_format",
    "quantize",
    "rounded_format",
    "row_bytes",
    "slice_rows",
    "tensor_bytes",
]
