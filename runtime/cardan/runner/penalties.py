"""Counts of tokens already seen, kept on the device for the rows that penalize repetition.

It knows rows and token ids only. A row takes a line when its seed comes, and loses it when it is next seen without
penalties; a line is cleared before it is seeded, so a reused row starts afresh.
"""

from __future__ import annotations

import numpy as np

from cardan.ops import Ops, Penalized
from cardan.types import Array, Int32Array, PenaltySeed, SamplingBatch

LINES_PER_GROWTH = 8


class PenaltyCounts:
    """Penalties of the rows that ask, over ``[lines, vocab]`` counts."""

    def __init__(self, ops: Ops, vocab_size: int) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._capacity = 0
        self._free: list[int] = []
        self._lines: dict[int, int] = {}
        self._output: Array = None
        self._prompt: Array = None

    def seed(self, seeds: tuple[PenaltySeed, ...]) -> None:
        """Start the counts of rows that are new on the device."""
        for seed in seeds:
            line = self._lines.get(seed.row_id)
            if line is None:
                line = self._lines[seed.row_id] = self._take_line()
            self._output = self._clear(self._output, line)
            self._prompt = self._clear(self._prompt, line)
            self._output = self._add(self._output, line, seed.output_ids, seed.output_counts)
            self._prompt = self._add(self._prompt, line, seed.prompt_ids, np.ones(len(seed.prompt_ids)))

    def asking(self, sampling: SamplingBatch) -> Int32Array:
        """Which of the sampled rows penalize; lines of the others are given back."""
        asks = (sampling.frequency_penalty != 0) | (sampling.presence_penalty != 0) | (sampling.repetition_penalty != 1)
        for row in sampling.row_ids[~asks]:
            line = self._lines.pop(int(row), None)
            if line is not None:
                self._free.append(line)
        return np.flatnonzero(asks).astype(np.int32)

    def penalized(self, sampling: SamplingBatch, asking: Int32Array) -> Penalized:
        """The lines of the sampled rows, of which ``asking`` penalize, and all counts."""
        lines = np.full(len(sampling.row_ids), -1, dtype=np.int32)
        lines[asking] = self._lines_of(sampling, asking)
        return Penalized(lines, self._prompt, self._output)

    def apply(self, logits: Array, sampling: SamplingBatch, asking: Int32Array) -> Array:
        """Logits ``[n, vocab]`` with the rows ``asking`` penalized; may change ``logits`` in place.

        Source: repetition: Keskar et al., "CTRL", section 4.1; frequency and presence: OpenAI's API reference.
        """
        ops = self._ops
        index = ops.from_host(asking)
        lines = ops.from_host(self._lines_of(sampling, asking))
        rows = ops.gather_rows(logits, index)
        output, prompt = ops.gather_rows(self._output, lines), ops.gather_rows(self._prompt, lines)
        repetition = self._column(sampling.repetition_penalty, asking)
        less = ops.where(
            ops.compare(rows, ">", 0.0),
            ops.arithmetic(rows, "/", repetition),
            ops.arithmetic(rows, "*", repetition),
        )
        rows = ops.where(ops.compare(ops.add(output, prompt), ">", 0.0), less, rows)
        frequency = ops.arithmetic(output, "*", self._column(sampling.frequency_penalty, asking))
        rows = ops.arithmetic(rows, "-", frequency)
        present = ops.arithmetic(rows, "-", self._column(sampling.presence_penalty, asking))
        rows = ops.where(ops.compare(output, ">", 0.0), present, rows)
        return ops.scatter_rows(logits, index, rows)

    def count(self, sampling: SamplingBatch, asking: Int32Array, tokens: Array) -> None:
        """Add the tokens just sampled, ``tokens: int32 [n]``."""
        ops = self._ops
        lines = ops.from_host(self._lines_of(sampling, asking))
        columns = ops.gather_rows(tokens, ops.from_host(asking))
        ones = ops.from_host(np.ones(len(asking), dtype=np.float32))
        self._output = ops.scatter_add(self._output, lines, columns, ones)

    def _lines_of(self, sampling: SamplingBatch, asking: Int32Array) -> Int32Array:
        rows = [int(row) for row in sampling.row_ids[asking]]
        missing = [row for row in rows if row not in self._lines]
        assert not missing, f"rows {missing} penalize repetition but were never seeded"
        return np.array([self._lines[row] for row in rows], dtype=np.int32)

    def _column(self, values: np.ndarray[tuple[int], np.dtype[np.float32]], asking: Int32Array) -> Array:
        return self._ops.from_host(values[asking][:, None].astype(np.float32))

    def _take_line(self) -> int:
        if not self._free:
            self._grow()
        return self._free.pop()

    def _grow(self) -> None:
        old, new = self._capacity, self._capacity + LINES_PER_GROWTH
        zeros = np.zeros((new, self._vocab_size), dtype=np.float32)
        grown = [self._ops.from_host(zeros) for _ in range(2)]
        if old:
            kept = self._ops.from_host(np.arange(old, dtype=np.int32))
            grown = [
                self._ops.scatter_rows(fresh, kept, counts)
                for fresh, counts in zip(grown, (self._output, self._prompt), strict=True)
            ]
        self._output, self._prompt = grown
        self._free.extend(range(new - 1, old - 1, -1))
        self._capacity = new

    def _clear(self, counts: Array, line: int) -> Array:
        index = self._ops.from_host(np.array([line], dtype=np.int32))
        return self._ops.scatter_rows(
            counts, index, self._ops.from_host(np.zeros((1, self._vocab_size), dtype=np.float32))
        )

    def _add(
        self,
        counts: Array,
        line: int,
        ids: Int32Array,
        amounts: np.ndarray[tuple[int], np.dtype[np.float64]] | Int32Array,
    ) -> Array:
        if len(ids) == 0:
            return counts
        ops = self._ops
        return ops.scatter_add(
            counts,
            ops.from_host(np.full(len(ids), line, dtype=np.int32)),
            ops.from_host(ids.astype(np.int32)),
            ops.from_host(amounts.astype(np.float32)),
        )
