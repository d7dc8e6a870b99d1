"""Arrays: how names of element types map to MLX, how a checkpoint's dense tensor becomes one, how computing starts.

It knows no quantized format.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from cardan.errors import UnsupportedError
from cardan.types import TensorView

start: Any = mx.async_eval
"""Starts computing arrays and returns; typed here, since MLX's own stub leaves it untyped."""

DTYPES: dict[str, Any] = {
    "float32": mx.float32,
    "bfloat16": mx.bfloat16,
    "float16": mx.float16,
    "int64": mx.int64,
    "int32": mx.int32,
    "int8": mx.int8,
    "bool": mx.bool_,
}

DENSE_FORMATS: dict[str, Any] = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
"""Checkpoint formats that are plain arrays of a float type."""

_CARRIERS: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def mlx_dtype(name: str) -> Any:
    """The MLX type of a dtype's name.

    Raises:
        UnsupportedError: MLX does not compute in it here.
    """
    found = DTYPES.get(name)
    if found is None:
        known = ", ".join(DTYPES)
        raise UnsupportedError(f"dtype must be one of {known} on MLX, got {name!r}. Pass one of these.")
    return found


def dense_array(view: TensorView) -> mx.array:
    """A copy of a dense ``view`` in the view's own type."""
    values: np.ndarray[Any, Any] = np.frombuffer(view.data, dtype=_CARRIERS[view.dtype], count=view.num_elements)
    array = mx.array(values.reshape(view.shape))
    return array.view(mx.bfloat16) if view.dtype == "BF16" else array
