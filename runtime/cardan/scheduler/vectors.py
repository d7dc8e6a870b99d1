"""Vectors that go along with the tokens of a step: hidden states that are wanted, and embeddings that were given.

It decides nothing; the assembler puts them into the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cardan.scheduler.request import Request
from cardan.scheduler.state import Extend
from cardan.types import Float32Array, Int32Array


@dataclass(frozen=True, slots=True)
class WantedStates:
    """Tokens of a batch whose hidden states are wanted, int32 ``[h]``, and whose they are: how many of each request."""

    index: Int32Array | None = None
    owners: tuple[tuple[Request, int], ...] = ()

    @classmethod
    def of(cls, requests: Sequence[Request], first: Int32Array, counts: Int32Array) -> WantedStates:
        """Look at each row of a batch. What an earlier step gives is left out.

        Args:
            requests: whose rows they are.
            first: int32 ``[rows]``, position of each row's first token.
            counts: int32 ``[rows]``, tokens of each row.
        """
        index: list[Int32Array] = []
        owners: list[tuple[Request, int]] = []
        offset = 0
        for request, start, count in zip(requests, first.tolist(), counts.tolist(), strict=True):
            begin = max(start, request.hidden_planned)
            if request.hidden_states and begin < start + count:
                request.hidden_planned = start + count
                index.append(np.arange(offset + begin - start, offset + count, dtype=np.int32))
                owners.append((request, start + count - begin))
            offset += count
        return cls(np.concatenate(index), tuple(owners)) if index else NO_STATES


NO_STATES = WantedStates()


def given_embeds(extends: Sequence[Extend]) -> tuple[Int32Array, Float32Array] | None:
    """Tokens of stretches of prompts that are given as vectors, int32 ``[m]``, and these; None where none is."""
    index: list[Int32Array] = []
    vectors: list[Float32Array] = []
    offset = 0
    for extend in extends:
        if extend.request.embeds is not None:
            given = extend.request.embeds[extend.start : extend.start + extend.count]
            index.append(np.arange(offset, offset + given.shape[0], dtype=np.int32))
            vectors.append(given)
        offset += extend.count
    return (np.concatenate(index), np.concatenate(vectors)) if index else None
