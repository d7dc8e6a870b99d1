"""How keys and values are stored: as floats of 16 or 32 bits, or as floats of 8 bits with a scale.

It knows no kernel. Floats of 8 bits are taken apart and put together by whole-number arithmetic, so that chips without
instructions for one of them, and Triton's interpreter, give the same bits as those that have them.

Source: OCP 8-bit Floating Point Specification (OFP8), revision 1.0, tables 1 and 2; for the form without infinities and
negative zero (fnuz) Noune et al., "8-bit Numerical Formats for Deep Neural Networks", section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cardan.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class KVFormat:
    """An element type of a KV pool.

    Attributes:
        name: of the torch type.
        code: how kernels tell formats apart: 0 is a plain float, else 1 e4m3fn, 2 e4m3fnuz, 3 e5m2.
        unit: for floats of 8 bits, what a value is multiplied by that was read with the exponent's bias of float16.
    """

    name: str
    code: int
    unit: float


FORMATS: Mapping[torch.dtype, KVFormat] = {
    torch.float32: KVFormat("float32", 0, 1.0),
    torch.bfloat16: KVFormat("bfloat16", 0, 1.0),
    torch.float16: KVFormat("float16", 0, 1.0),
    torch.float8_e4m3fn: KVFormat("float8_e4m3fn", 1, 256.0),
    torch.float8_e4m3fnuz: KVFormat("float8_e4m3fnuz", 2, 128.0),
    torch.float8_e5m2: KVFormat("float8_e5m2", 3, 1.0),
}


def kv_format(dtype: torch.dtype) -> KVFormat:
    """The format of a torch type.

    Raises:
        UnsupportedError: kernels read no such type.
    """
    found = FORMATS.get(dtype)
    if found is None:
        known = ", ".join(item.name for item in FORMATS.values())
        raise UnsupportedError(f"keys and values must be one of {known}, got {dtype}. Pass a pool of such a type.")
    return found


def as_stored(x: torch.Tensor) -> torch.Tensor:
    """A pool's tensor as kernels take it: floats of 8 bits as uint8, the others as they are."""
    return x.view(torch.uint8) if kv_format(x.dtype).code else x
