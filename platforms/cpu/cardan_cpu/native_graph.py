"""Decode steps, and what follows them, recorded as lists of native kernels over fixed buffers.

It knows no model: a step is a function that the runner gives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cardan.platform import AttentionMeta, CapturedStep, GraphRunner, Recorder, Recording
from cardan_cpu.native_attention import NativeAttention, NativePlan
from cardan_native import Graph, Kernels, Tensor, to_bits

EXACT_ROWS = 16
"""Up to so many rows each number has a list of its own; above, rows are filled up to a multiple of ``ROW_STEP``."""

ROW_STEP = 8

MOST_GRAPHS = 48
"""Recorded steps kept; the one unused for longest goes first."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded step.

    Attributes:
        graph: its kernels.
        input_ids: int32 ``[rows]``, read by them.
        plan: the attention's, read by them.
        hidden: ``[rows, hidden]``, written by them.
    """

    graph: Graph
    input_ids: Tensor
    plan: NativePlan
    hidden: Tensor


class NativeGraphRunner(GraphRunner):
    """Records a step when its number of rows is first met, and replays it by one call from then on.

    Rows that fill up have no length and no output slot, so they read and write nothing. What a replay returns is
    overwritten by the next one.
    """

    captures_ahead = False

    def __init__(self, backend: NativeAttention, step: CapturedStep) -> None:
        """Make a runner.

        Args:
            backend: whose plans the step takes.
            step: ``(input_ids, positions, plan) -> hidden``.
        """
        self._backend = backend
        self._step = step
        self._recorded: OrderedDict[int, Recorded] = OrderedDict()

    @property
    def recorded_rows(self) -> tuple[int, ...]:
        """Numbers of rows of the recorded steps, the one unused for longest first."""
        return tuple(self._recorded)

    @property
    def num_bytes(self) -> int:
        """Bytes of all recorded steps' buffers."""
        return sum(recorded.graph.num_bytes for recorded in self._recorded.values())

    def can_replay(self, meta: AttentionMeta) -> bool:
        """Every decode step can be."""
        return len(meta.row_ids) > 0

    def replay(self, input_ids: Tensor, meta: AttentionMeta) -> Tensor:
        """Run a decode step; returns ``[rows, hidden]``."""
        count = len(meta.row_ids)
        rows = fill_up(count)
        ids = input_ids.bits()
        if rows > count:
            ids = np.concatenate((ids, np.zeros(rows - count, dtype=np.int32)))
        recorded = self._recorded.get(rows)
        if recorded is None:
            recorded = self._record(ids, meta, rows)
        else:
            recorded.input_ids.copy_bits(ids)
            recorded.plan.refill(meta)
            recorded.graph.replay()
        self._recorded.move_to_end(rows)
        if rows == count:
            return recorded.hidden
        native = self._backend.native
        return native.gather_rows(recorded.hidden, native.Tensor.from_bits(np.arange(count, dtype=np.int32), "int32"))

    def _record(self, ids: np.ndarray[Any, Any], meta: AttentionMeta, rows: int) -> Recorded:
        """Run the step for the first time, and keep its kernels."""
        native = self._backend.native
        plan = self._backend.fixed_plan(rows)
        plan.refill(meta)
        input_ids = native.Tensor.from_bits(ids, "int32")
        graph = native.Graph()
        with graph:
            hidden = self._step(input_ids, plan.positions, plan)
        recorded = self._recorded[rows] = Recorded(graph, input_ids, plan, hidden)
        if len(self._recorded) > MOST_GRAPHS:
            self._recorded.popitem(last=False)
        return recorded


class NativeRecording(Recording):
    """A list of kernels."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def replay(self) -> None:
        """Run them again."""
        self.graph.replay()


class NativeRecorder(Recorder):
    """Records whatever is computed while it records; arrays from the host keep their memory."""

    def __init__(self, native: Kernels) -> None:
        """Take the kernels of one variant."""
        self._native = native

    def record(self, run: Callable[[], tuple[Tensor, ...]]) -> tuple[NativeRecording, tuple[Tensor, ...]]:
        """See ``Recorder.record``."""
        graph = self._native.Graph()
        with graph:
            results = run()
        return NativeRecording(graph), results

    def fill(self, x: Tensor, values: np.ndarray[Any, Any]) -> None:
        """See ``Recorder.fill``."""
        x.copy_bits(to_bits(values))


def fill_up(rows: int) -> int:
    """The number of rows that a step of ``rows`` is recorded with."""
    return rows if rows <= EXACT_ROWS else -(-rows // ROW_STEP) * ROW_STEP
