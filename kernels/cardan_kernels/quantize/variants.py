"""Variants of the kernels that quantize activations.

It compiles nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cardan_kernels.chips import chip
from cardan_kernels.compiled.variant import Variant, empty
from cardan_kernels.quantize.rows import quantize_rows

COLUMNS = 4096
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def variants(name: str) -> tuple[Variant, ...]:
    """Variants for one chip."""
    return tuple(_variants(chip(name).float8))


def _variants(float8: torch.dtype | None) -> Iterator[Variant]:
    kinds = {"int8": torch.int8} | ({} if float8 is None else {"float8": float8})
    for kind, dtype in kinds.items():
        for key, given in DTYPES.items():
            for scales in ("rows", "groups"):

                def run(given: torch.dtype = given, dtype: torch.dtype = dtype, scales: str = scales) -> object:
                    return quantize_rows(empty((16, COLUMNS), given), dtype, grouped=scales == "groups")

                yield Variant("quantize_rows", {"codes": kind, "dtype": key, "scales": f"scales of {scales}"}, run)
