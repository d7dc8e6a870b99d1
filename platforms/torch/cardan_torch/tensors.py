"""Element types and bytes: how names of the seam map to torch, and how a checkpoint's tensor becomes one.

It does not know quantized formats; those belong to linear methods that claim them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cardan.errors import UnsupportedError
from cardan.types import TensorView

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "bool": torch.bool,
}

DENSE_FORMATS: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Checkpoint formats that are plain arrays of a float type."""

_CARRIERS: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: np.int16}


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a dtype's name.

    Raises:
        UnsupportedError: torch devices do not compute in it.
    """
    found = DTYPES.get(name)
    if found is None:
        known = ", ".join(DTYPES)
        raise UnsupportedError(f"dtype must be one of {known} on torch devices, got {name!r}. Pass one of these.")
    return found


def dense_tensor(view: TensorView) -> torch.Tensor:
    """A copy of a dense ``view`` in host memory, in the view's own type."""
    dtype = DENSE_FORMATS[view.dtype]
    array: np.ndarray[Any, Any] = np.frombuffer(view.data, dtype=_CARRIERS[dtype], count=view.num_elements)
    return torch.from_numpy(array.copy()).view(dtype).reshape(view.shape)
