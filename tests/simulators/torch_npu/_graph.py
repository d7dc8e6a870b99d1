"""Graphs of the simulated NPU: calls are recorded, and run again by a replay over the same memory.

Sources, of the documentation of Ascend Extension for PyTorch 7.3.0 and 26.0.0: ``torch_npu.npu.NPUGraph``,
``torch_npu.npu.graph``, ``NPUGraph.update`` ("cpu_update_input"), and the restrictions of the page on ACLGraph: data
come in by ``copy_`` to captured addresses, the host cannot wait for a captured stream, and lengths that an operator
takes from the host keep their captured values unless they are updated before the replay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_npu import _tensor
from torch_npu._memory import allocation_of
from torch_npu._refusal import refuse, require

MOST_STREAMS = 2048
"""Of a device; a captured graph takes one at least, until it is gone."""

HOST_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "npu_fused_infer_attention_score": ("actual_seq_lengths", "actual_seq_lengths_kv"),
}
"""Operators whose captured calls wait for an update, and the arguments that it may bring."""

_graphs: weakref.WeakSet[NPUGraph] = weakref.WeakSet()


@dataclass(slots=True)
class Entry:
    """A recorded call.

    Attributes:
        func: what is called.
        args: its arguments, in host memory.
        kwargs: its arguments by name.
        run: computes it.
        out: what a replay writes, or None for what changes its arguments or only views them.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    run: Callable[..., Any]
    out: list[torch.Tensor] | None


@dataclass(slots=True)
class _Capture(_tensor.Recording):
    """A capture under way."""

    entries: list[Entry] = field(default_factory=list)
    own: dict[int, torch.Tensor] = field(default_factory=dict)
    outside: dict[int, Any] = field(default_factory=dict)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        """Record a call. Nothing that was there before is changed; what is new has no values that mean anything."""
        given = {address(tensor) for tensor in _all_tensors(args) + _all_tensors(tuple(kwargs.values()))}
        for tensor in _all_tensors(args) + _all_tensors(tuple(kwargs.values())):
            self._note_outside(tensor)
        schema = getattr(func, "_schema", None)
        mutates = schema.is_mutable if schema is not None else func.__name__.endswith("_")
        if mutates:
            target = kwargs.get("out", args[0])
            self.entries.append(Entry(func, args, kwargs, run, None))
            if address(target) in self.own:
                run(func, args, kwargs)
            return target
        out = run(func, args, kwargs)
        made = _all_tensors((out,))
        if any(address(tensor) in given for tensor in made if tensor.numel()):
            return out
        self.own.update((address(tensor), tensor) for tensor in made)
        if given or func.__name__ != "empty.memory_format":
            self.entries.append(Entry(func, args, kwargs, run, made))
        return out

    def _note_outside(self, tensor: torch.Tensor) -> None:
        place = address(tensor)
        if place not in self.own and place not in self.outside and tensor.untyped_storage().nbytes():
            found = allocation_of(place, tensor.untyped_storage().nbytes())
            self.outside[place] = weakref.ref(found)


def address(tensor: torch.Tensor) -> int:
    """Where a tensor's storage is."""
    return tensor.untyped_storage().data_ptr()


def _all_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _all_tensors(item)] if isinstance(value, list | tuple) else []


class NPUGraph:
    """Recorded calls over fixed memory."""

    def __init__(self) -> None:
        """An empty graph."""
        self._capture: _Capture | None = None
        self._updatable: list[Entry] = []
        self._updated = False
        self._auto = False

    def capture_begin(self, pool: Any = None, auto_dispatch_capture: bool = False) -> None:
        """Start recording."""
        require(_tensor.state.recording is None, "NPUGraph.capture_begin", "another capture is under way")
        require(self._capture is None, "NPUGraph.capture_begin", "this graph was captured before; call reset()")
        require(
            len(_graphs) < MOST_STREAMS,
            "NPUGraph.capture_begin",
            f"the {MOST_STREAMS} streams of the device are used up by captured graphs (207008)",
        )
        self._auto = auto_dispatch_capture
        self._capture = _Capture()
        _tensor.state.recording = self._capture

    def capture_end(self) -> None:
        """Stop recording; what was computed has no values until a replay."""
        capture = self._capture
        require(
            capture is not None and _tensor.state.recording is capture, "NPUGraph.capture_end", "nothing is captured"
        )
        assert capture is not None
        _tensor.state.recording = None
        _graphs.add(self)
        if self._auto:
            self._updatable = [entry for entry in capture.entries if _name(entry) in HOST_ARGUMENTS]
        for tensor in capture.own.values():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))

    def abort(self) -> None:
        """Stop recording after an error."""
        _tensor.state.recording = None
        self._capture = None

    def update(self, cpu_update_input: list[dict[str, Any]]) -> None:
        """Bring host arguments: one for all operators, or one for each in the order of their capture."""
        function = "NPUGraph.update"
        require(self._capture is not None, function, "the graph was not captured")
        require(self._auto, function, "the graph must be captured with auto_dispatch_capture=True")
        require(_tensor.state.recording is None, function, "a capture is under way on the stream")
        count = len(self._updatable)
        require(
            len(cpu_update_input) in (1, count),
            function,
            f"cpu_update_input must have 1 or {count} entries, one for each operator, got {len(cpu_update_input)}",
        )
        for index, entry in enumerate(self._updatable):
            values = cpu_update_input[0 if len(cpu_update_input) == 1 else index]
            known = HOST_ARGUMENTS[_name(entry)]
            unknown = sorted(values.keys() - set(known))
            require(not unknown, function, f"{_name(entry)} takes {', '.join(known)} from the host, got {unknown}")
            entry.kwargs = {**entry.kwargs, **values}
        self._updated = True

    def replay(self) -> None:
        """Run the recorded calls again."""
        function = "NPUGraph.replay"
        require(_tensor.state.recording is None, function, "a capture is under way")
        capture = self._capture
        if capture is None:
            refuse(function, "the graph was not captured")
        if self._updatable and not self._updated:
            refuse(function, "operators that take lengths from the host wait for NPUGraph.update(), which did not come")
        for held in capture.outside.values():
            require(held() is not None, function, "memory that the graph reads or writes was given back (507899)")
        self._updated = False
        for entry in capture.entries:
            result = entry.run(entry.func, entry.args, entry.kwargs)
            if entry.out is not None:
                for old, new in zip(entry.out, _all_tensors((result,)), strict=True):
                    old.copy_(new)

    def reset(self) -> None:
        """Give the graph's memory and stream back."""
        self._capture = None
        self._updatable = []
        _graphs.discard(self)

    def pool(self) -> tuple[int, int]:
        """The memory pool of its capture."""
        return (0, 1)


def _name(entry: Entry) -> str:
    return str(entry.func.__name__)


class graph:  # noqa: N801
    """Captures what runs inside a ``with`` block."""

    def __init__(
        self, npu_graph: NPUGraph, pool: Any = None, stream: Any = None, auto_dispatch_capture: bool = False
    ) -> None:
        """Name the graph."""
        self._graph = npu_graph
        self._pool = pool
        self._auto = auto_dispatch_capture

    def __enter__(self) -> None:
        """Start recording."""
        self._graph.capture_begin(self._pool, self._auto)

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Stop recording."""
        if kind is None:
            self._graph.capture_end()
        else:
            self._graph.abort()


def captured_graphs() -> int:
    """Graphs that hold a stream."""
    return len(_graphs)
