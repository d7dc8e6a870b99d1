"""Variants of gated activations.

It compiles nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cardan_kernels.activation.gates import gelu_mul, silu_mul
from cardan_kernels.compiled.variant import Variant, empty

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SIZE = 14336


def variants(name: str) -> tuple[Variant, ...]:
    """Variants for one chip."""
    return tuple(_variants())


def _variants() -> Iterator[Variant]:
    for key, dtype in DTYPES.items():

        def silu(dtype: torch.dtype = dtype) -> object:
            return silu_mul(empty((64, 2 * SIZE), dtype), SIZE)

        yield Variant("silu_mul", {"dtype": key}, silu)
        for gate, approximate in (("erf", False), ("tanh", True)):

            def gelu(dtype: torch.dtype = dtype, approximate: bool = approximate) -> object:
                return gelu_mul(empty((64, 2 * SIZE), dtype), SIZE, approximate)

            yield Variant("gelu_mul", {"dtype": key, "gate": gate}, gelu)
