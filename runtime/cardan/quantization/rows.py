"""Rows of a tensor, picked without widening: a row consists of whole blocks in every format.

It knows no model; why rows are sliced or reordered is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from cardan.errors import CheckpointError
from cardan.quantization.formats import format_spec, tensor_bytes
from cardan.types import TensorView


def slice_rows(view: TensorView, start: int, stop: int) -> TensorView:
    """Rows ``start .. stop`` of the first axis, sharing the bytes of ``view``.

    A vector is sliced by elements, which only dense formats allow.

    Raises:
        CheckpointError: the range is not within the tensor, or a vector is quantized.
    """
    size = _first_axis_bytes(view)
    if not 0 <= start <= stop <= view.shape[0]:
        raise CheckpointError(f"Tensor {view.name!r} has {view.shape[0]} rows, rows {start} to {stop} were wanted.")
    data = view.data[start * size : stop * size]
    return replace(view, shape=(stop - start, *view.shape[1:]), data=data)


def gather_rows(view: TensorView, rows: Sequence[int] | npt.NDArray[np.integer]) -> TensorView:
    """Rows of the first axis in the order of ``rows``, copied.

    Raises:
        CheckpointError: a row is not within the tensor, or a vector is quantized.
    """
    size = _first_axis_bytes(view)
    index = np.asarray(rows, dtype=np.int64)
    if index.size and not (index.min() >= 0 and index.max() < view.shape[0]):
        raise CheckpointError(
            f"Tensor {view.name!r} has {view.shape[0]} rows, rows {index.min()} to {index.max()} were wanted."
        )
    table = np.frombuffer(view.data, dtype=np.uint8).reshape(view.shape[0], size)
    picked = np.ascontiguousarray(table[index])
    return replace(view, shape=(index.size, *view.shape[1:]), data=picked.data.cast("B"))


def _first_axis_bytes(view: TensorView) -> int:
    if not view.shape:
        raise CheckpointError(f"Tensor {view.name!r} is a scalar and has no rows.")
    if len(view.shape) == 1:
        spec = format_spec(view.dtype)
        if spec.quantized:
            raise CheckpointError(
                f"Tensor {view.name!r} is a vector of {view.dtype} blocks, whose elements do not part."
            )
        return spec.block_bytes
    return tensor_bytes(view.dtype, view.shape[1:])
