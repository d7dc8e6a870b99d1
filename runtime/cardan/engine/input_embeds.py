"""Prompts that are given as vectors instead of token ids: read from plain values, checked, and sent as bytes.

It knows no model beyond the width of its vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cardan.errors import RequestError
from cardan.types import Float32Array

PARAM = "input_embeds"


def read_embeds(value: Any) -> Float32Array:
    """Vectors of one prompt, from a list of lists of numbers or an array. Returns float32 ``[tokens, width]``.

    Raises:
        RequestError: it is something else, or the lists differ in length.
    """
    try:
        array = np.asarray(value)
    except ValueError:
        raise RequestError(f"{PARAM} must be a list of vectors of one length; theirs differ.", param=PARAM) from None
    if array.ndim != 2 or array.dtype.kind not in "iuf" or not array.size:
        shape = f"shape {list(array.shape)} of {array.dtype}" if array.dtype.kind in "iufb" else "something else"
        raise RequestError(
            f"{PARAM} must be a list of at least one vector of numbers, [tokens, hidden size], got {shape}.",
            param=PARAM,
        )
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array, dtype=np.float32)


def are_many_embeds(value: Any) -> bool:
    """Whether a value is a list of prompts of vectors, rather than one prompt."""
    first = value[0] if isinstance(value, (list, tuple)) and value else None
    if isinstance(first, np.ndarray):
        return first.ndim == 2
    return isinstance(first, (list, tuple)) and bool(first) and isinstance(first[0], (list, tuple, np.ndarray))


def check_embeds(vectors: Float32Array, hidden_size: int) -> None:
    """Check the vectors of a prompt.

    Raises:
        RequestError: they are none, of another width than the model's, or hold what is no finite float32.
    """
    if vectors.ndim != 2 or vectors.dtype != np.float32 or not vectors.shape[0] or vectors.shape[1] != hidden_size:
        raise RequestError(
            f"{PARAM} must have the shape [tokens, {hidden_size}], which is the model's hidden size, got "
            f"{list(vectors.shape)}.",
            param=PARAM,
        )
    finite = np.isfinite(vectors)
    if not finite.all():
        token, place = np.argwhere(~finite)[0].tolist()
        raise RequestError(
            f"{PARAM} must hold finite float32 numbers, got {vectors[token, place]} at [{token}][{place}].", param=PARAM
        )


def read_vectors(data: bytes | None, num_tokens: int) -> Float32Array | None:
    """The vectors of a prompt from the bytes of their float32 values, ``[num_tokens, width]``; None for None."""
    return None if data is None else np.frombuffer(data, dtype=np.float32).reshape(num_tokens, -1)
