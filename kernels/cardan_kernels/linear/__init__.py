"""Linears over weights that stay in their codes, and over codes on both sides."""

from cardan_kernels.linear.coded import coded_linear, coded_rows
from cardan_kernels.linear.coding import LAYOUTS, BlockLayout, CodedMatrix, Coding, ScaledMatrix
from cardan_kernels.linear.packing import pack_coded, scaled_from
from cardan_kernels.linear.scaled import scaled_linear

__all__ = [
    "LAYOUTS",
    "BlockLayout",
    "CodedMatrix",
    "Coding",
    "ScaledMatrix",
    "coded_linear",
    "coded_rows",
    "pack_coded",
    "scaled_from",
    "scaled_linear",
]
