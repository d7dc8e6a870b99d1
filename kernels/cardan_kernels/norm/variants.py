"""Variants of normalizations: types, and rows from a head's to the widest model's.

It compiles nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cardan_kernels.compiled.variant import Variant, empty
from cardan_kernels.norm.rms import add_rms_norm, rms_norm

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WIDTHS = (64, 128, 256, 1024, 4096, 8192, 16384)


def variants(name: str) -> tuple[Variant, ...]:
    """Variants for one chip."""
    return tuple(_variants())


def _variants() -> Iterator[Variant]:
    for key, dtype in DTYPES.items():
        for width in WIDTHS:

            def norm(dtype: torch.dtype = dtype, width: int = width) -> object:
                return rms_norm(empty((64, width), dtype), empty((width,), dtype), 1e-5)

            def add(dtype: torch.dtype = dtype, width: int = width) -> object:
                x = empty((64, width), dtype)
                return add_rms_norm(x, x, empty((width,), dtype), 1e-5)

            features = {"dtype": key, "features": f"features {width}"}
            yield Variant("rms_norm", features, norm)
            yield Variant("add_rms_norm", features, add)
