"""Platforms with one fault each: a real one whose device, kernels or runner do one thing wrong. It knows no test.

A fault stands below what attribution watches: in tables, kernels, packing, plans of attention, graphs or sampling.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cardan.platform import AttentionMeta, GraphRunner, Platform, Runner
from cardan.platform.discovery import load_platform
from cardan.quantization import FLOAT8_FORMATS, dequantize, format_spec
from cardan.runner import NeutralDevice
from cardan.types import Batch, ForwardMode, LayerKV, TensorView

FAULTY_LAYER = 1
CHUNK = 8


def planted(device_class: type[NeutralDevice], name: str = "cpu") -> Platform:
    """The platform ``name`` whose devices are of a class; it keeps the platform's name."""
    platform = load_platform(name)

    class Planted(type(platform)):  # type: ignore[misc]
        def open(self, device: Any, options: Any) -> Any:
            return device_class(super().open(device, options))

    made = copy.copy(platform)
    made.__class__ = Planted
    return made


class Through:
    """Passes everything on to what it stands for."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


# --- tables and kernels of layers ---


class WrongRope(NeutralDevice):
    """Angles of a base that is one percent larger."""

    def load(self, model: Any, *arguments: Any) -> Any:
        loaded = super().load(model, *arguments)
        table = model.rope_tables(64)[0]
        pairs = table.rotary_dim // 2
        frequencies = 10100.0 ** (-np.arange(pairs) / pairs)
        angles = np.arange(len(table.cos))[:, None] * frequencies
        place = self.device.ops.from_host
        loaded.ropes = ((place(np.cos(angles), "float32"), place(np.sin(angles), "float32"), table.interleaved),)
        return loaded


class _EpsilonOps(Through):
    weights: list[Any]

    def _eps(self, weight: Any, eps: float) -> float:
        return 1e-2 if any(weight is target for target in self.weights) else eps

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        return self.inner.rms_norm(x, weight, self._eps(weight, eps))

    def add_rms_norm(self, x: Any, residual: Any, weight: Any, eps: float) -> Any:
        return self.inner.add_rms_norm(x, residual, weight, self._eps(weight, eps))


class WrongEpsilon(NeutralDevice):
    """One layer's norm with an epsilon of a hundredth."""

    def __init__(self, device: Any) -> None:
        through, ops = Through(device), _EpsilonOps(device.ops)
        through.ops = ops
        ops.weights = []
        super().__init__(through)  # type: ignore[arg-type]

    def load(self, *arguments: Any) -> Any:
        loaded = super().load(*arguments)
        self.device.ops.weights += [
            weight for name, weight in loaded.weights.items() if name == f"layers.{FAULTY_LAYER}.mlp_norm"
        ]
        return loaded


# --- attention ---


class _ChangedAttention(NeutralDevice):
    """Attention whose plans or inputs are changed."""

    def __init__(self, device: Any) -> None:
        through, attention = Through(device), device.attention
        through.attention = lambda *arguments: self._changed(attention(*arguments))
        super().__init__(through)  # type: ignore[arg-type]

    def _changed(self, backend: Any) -> Any:
        plan, forward = backend.plan, backend.forward

        def changed(q: Any, k: Any, v: Any, layer: LayerKV, plan: Any, sinks: Any = None) -> Any:
            return forward(q, self.keys(k, layer), v, self.layer(layer), plan, sinks)

        backend.plan = lambda meta: plan(self.meta(meta))
        backend.forward = changed
        return backend

    def keys(self, k: Any, layer: LayerKV) -> Any:
        """What is written and attended to for keys."""
        return k

    def layer(self, layer: LayerKV) -> LayerKV:
        """What attention takes the layer for."""
        return layer

    def meta(self, meta: AttentionMeta) -> AttentionMeta:
        """What attention takes the step for."""
        return meta


class SwappedHeads(_ChangedAttention):
    """The keys of one layer's two heads change places."""

    def keys(self, k: Any, layer: LayerKV) -> Any:
        if layer.index != FAULTY_LAYER:
            return k
        ops = self.device.ops
        first, second = ops.split(ops.merge_heads(k), (layer.k_dim, layer.k_dim))
        return ops.split_heads(ops.concat((second, first)), layer.kv_heads)


class WrongFusion(_ChangedAttention):
    """A kernel that rotates and attends at once leaves the keys as they are."""

    def _changed(self, backend: Any) -> Any:
        def forward_rotating(
            qkv: tuple[Any, Any, Any], rotation: Any, layer: LayerKV, plan: Any, sinks: Any = None
        ) -> Any:
            q, k, v = qkv
            return backend.forward(self.device.ops.rope_apply(q, rotation), k, v, layer, plan, sinks)

        backend.forward_rotating = forward_rotating
        return backend


class WideWindow(_ChangedAttention):
    """One layer's queries see a key more than its window holds."""

    def layer(self, layer: LayerKV) -> LayerKV:
        assert layer.window is not None
        return replace(layer, window=layer.window + 1) if layer.index == FAULTY_LAYER else layer


class LateSlots(_ChangedAttention):
    """From a prompt's third chunk on keys and values go to the slot of the token after theirs."""

    def meta(self, meta: AttentionMeta) -> AttentionMeta:
        if meta.mode is ForwardMode.DECODE:
            return meta
        slots = meta.out_slots.copy()
        for start, stop in zip(meta.query_starts[:-1], meta.query_starts[1:], strict=True):
            if meta.positions[start] >= 2 * CHUNK:
                slots[:, start : stop - 1] = meta.out_slots[:, start + 1 : stop]
        return replace(meta, out_slots=slots)


class LateSlotsAfterCache(_ChangedAttention):
    """Where a prompt goes on after what is cached, keys and values go to the slot of the token after theirs."""

    def meta(self, meta: AttentionMeta) -> AttentionMeta:
        if meta.mode is ForwardMode.DECODE:
            return meta
        slots = meta.out_slots.copy()
        for start, stop in zip(meta.query_starts[:-1], meta.query_starts[1:], strict=True):
            if meta.positions[start] > 0:
                slots[:, start : stop - 1] = meta.out_slots[:, start + 1 : stop]
        return replace(meta, out_slots=slots)


# --- packing ---


class _ChangedPacking(NeutralDevice):
    """Linear methods to which some quantized weights come with other values."""

    def __init__(self, device: Any) -> None:
        through = Through(device)
        through.linear_methods = lambda: tuple(self._method(method) for method in device.linear_methods())
        super().__init__(through)  # type: ignore[arg-type]

    def _method(self, method: Any) -> Any:
        changed = Through(method)

        def pack(views: Sequence[TensorView], spec: Any, bias: Any) -> Any:
            changes = [self.values(view, spec.name) for view in views]
            if any(values is not None for values in changes):
                views = [
                    replace(
                        view, dtype="F32", data=np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8).data
                    )
                    for view, values in zip(views, changes, strict=True)
                ]
            return method.pack(views, spec, bias)

        changed.pack = pack
        return changed

    def values(self, view: TensorView, name: str) -> Any:
        """Other values for a view, or None."""
        raise AssertionError


class WrongBlock(_ChangedPacking):
    """The scale of one block of one layer's weight is sixteen times too large."""

    def values(self, view: TensorView, name: str) -> Any:
        spec = format_spec(view.dtype)
        if name != f"layers.{FAULTY_LAYER}.down" or not spec.quantized:
            return None
        values = dequantize(view).copy()
        values[3, : spec.group] *= 16.0
        return values


class DoubledFloat8(_ChangedPacking):
    """Scales of eight-bit floats are twice what they are."""

    def values(self, view: TensorView, name: str) -> Any:
        return 2.0 * dequantize(view) if view.dtype in FLOAT8_FORMATS else None


# --- sampling ---


class _ChangedSampling(NeutralDevice):
    def runner(self, *arguments: Any) -> Runner:
        runner = super().runner(*arguments)
        launch = runner.launch

        def changed(batch: Batch) -> Any:
            sampling = batch.sampling
            return launch(batch if sampling is None else replace(batch, sampling=self.sampling(sampling)))

        runner.launch = changed  # type: ignore[method-assign]
        return runner

    def sampling(self, sampling: Any) -> Any:
        """What rows are sampled by."""
        raise AssertionError


class NoTopP(_ChangedSampling):
    """Top-p is ignored."""

    def sampling(self, sampling: Any) -> Any:
        return replace(sampling, top_p=np.ones_like(sampling.top_p))


class NoPenalties(_ChangedSampling):
    """Frequency penalties are ignored."""

    def sampling(self, sampling: Any) -> Any:
        return replace(sampling, frequency_penalty=np.zeros_like(sampling.frequency_penalty))


# --- graphs ---


class _FrontPadded(GraphRunner):
    """Fills a step's rows up to a power of two in front of them, and gives the first rows back."""

    def __init__(self, inner: GraphRunner, ops: Any) -> None:
        self._inner = inner
        self._ops = ops

    def can_replay(self, meta: AttentionMeta) -> bool:
        return self._inner.can_replay(meta)

    def replay(self, input_ids: Any, meta: AttentionMeta) -> Any:
        count = len(meta.row_ids)
        rows = 1 << (count - 1).bit_length()
        index = np.concatenate((np.zeros(rows - count, np.int32), np.arange(count, dtype=np.int32)))
        padded = replace(
            meta,
            query_starts=np.arange(rows + 1, dtype=np.int32),
            seq_lens=meta.seq_lens[index],
            row_ids=meta.row_ids[index],
            positions=meta.positions[index],
            out_slots=np.ascontiguousarray(meta.out_slots[:, index]),
        )
        ops = self._ops
        hidden = self._inner.replay(ops.gather_rows(input_ids, ops.from_host(index)), padded)
        return ops.gather_rows(hidden, ops.from_host(np.arange(count, dtype=np.int32)))


def _with_graphs(device: Any, faulty: type[GraphRunner]) -> Any:
    """The device, whose captured steps go through a faulty runner."""
    through = Through(device)

    def graph_runner(*arguments: Any) -> Any:
        made = device.graph_runner(*arguments)
        return None if made is None else faulty(made, device.ops)

    through.graph_runner = graph_runner
    through.recorder = lambda: None
    return through


class WrongBucket(NeutralDevice):
    """Captured steps whose padding stands in front of the rows."""

    def __init__(self, device: Any) -> None:
        super().__init__(_with_graphs(device, _FrontPadded))


class _Enlarged(GraphRunner):
    """Gives a step's hidden states a tenth too large."""

    def __init__(self, inner: GraphRunner, ops: Any) -> None:
        self._inner = inner
        self._ops = ops

    def can_replay(self, meta: AttentionMeta) -> bool:
        return self._inner.can_replay(meta)

    def replay(self, input_ids: Any, meta: AttentionMeta) -> Any:
        return self._ops.scale(self._inner.replay(input_ids, meta), 1.1)


class TwoFaults(LateSlotsAfterCache):
    """Captured steps are wrong whatever the batch, and so is what follows a cached prefix."""

    def __init__(self, device: Any) -> None:
        super().__init__(_with_graphs(device, _Enlarged))


# --- memory ---


class NoRoom(NeutralDevice):
    """Has memory for one model and one pool.

    Attributes:
        opened: the last one.
        slots: what was asked for in each pool.
    """

    opened: NoRoom

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self._models = 0
        self.slots: list[int] = []
        NoRoom.opened = self

    def load(self, *arguments: Any) -> Any:
        self._models += 1
        if self._models > 1:
            raise MemoryError(f"no room for model {self._models}")
        return super().load(*arguments)

    def allocate_kv(self, layout: Any, num_slots: int, *arguments: Any) -> Any:
        self.slots.append(num_slots)
        if len(self.slots) > 1:
            raise RuntimeError(f"no room for a pool of {num_slots} slots\nsome more lines")
        return super().allocate_kv(layout, num_slots, *arguments)
