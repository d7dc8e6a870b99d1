"""Tells whether what a request asks for left any token to a row: its mask, its biases and the logits it was given.

It does not know the logits that a device computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cardan.types import Float32Array, SamplingBatch


@dataclass(frozen=True, slots=True, eq=False)
class SampledWith:
    """What the rows of a step sampled with.

    Attributes:
        sampling: their sampling state, with what logit processors said.
        mask: packed masks ``[n, words]`` of grammars, or None where no row has one.
    """

    sampling: SamplingBatch
    mask: npt.NDArray[np.uint32] | None = None

    def allows_any(self, row: int, vocab_size: int) -> bool:
        """Whether a row could sample any token if the model's logits were numbers.

        Args:
            row: its place among the rows that sample.
            vocab_size: how many logits a row has.
        """
        sampling = self.sampling
        logits = np.zeros(vocab_size, dtype=np.float32)
        if sampling.given_logits is not None:
            of_rows, given = sampling.given_logits
            for place in np.flatnonzero(of_rows == row).tolist():
                logits = given[place].copy()
        of_row = sampling.bias_index == row
        with np.errstate(over="ignore"):
            logits[sampling.bias_ids[of_row]] += sampling.bias_values[of_row]
        allowed = logits > -np.inf
        if self.mask is not None and sampling.has_mask[row]:
            bits = np.unpackbits(np.ascontiguousarray(self.mask[row]).view(np.uint8), bitorder="little")
            allowed &= bits[:vocab_size].astype(np.bool_)
        return bool(allowed.any())


def as_float32(values: Iterable[float]) -> Float32Array:
    """What is added to logits, as devices take it: what no float32 holds becomes infinite, which is what it means."""
    with np.errstate(over="ignore"):
        return np.asarray(values if isinstance(values, np.ndarray) else list(values)).astype(np.float32)
