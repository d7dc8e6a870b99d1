"""Brings a model's parameters onto a device: row ranges of checkpoint tensors, packed or widened.

It knows no model family and no format: linear methods say which formats they take, the checkpoint widens the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, overload

import numpy as np

from cardan.errors import CheckpointError, UnsupportedError
from cardan.platform import (
    Checkpoint,
    LinearMethod,
    LinearSpec,
    Model,
    OpsDevice,
    PackedWeight,
    Parameter,
    ParameterKind,
    Source,
)
from cardan.runner.composite import CompositeWeight
from cardan.runner.ordered import OrderedWeight
from cardan.types import Array, Float32Array, TensorView

DENSE_FORMATS = frozenset({"F32", "F16", "BF16"})
WIDENED = "F32"
NAMES_SHOWN = 3

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Weights:
    """What loading gave.

    Attributes:
        arrays: packed weights and vectors under the names of the model's parameters.
        num_bytes: bytes on the device, storage that is shared counted once.
        notes: formats widened, parts not fused, tensors not used.
    """

    arrays: dict[str, Any]
    num_bytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Kind:
    """What views must have in common to be packed together.

    Attributes:
        fmt: they are packed in.
        order: of their columns, as bytes; empty for in order.
    """

    fmt: str
    order: bytes = b""

    @classmethod
    def of(cls, view: TensorView, fmt: str) -> _Kind:
        """The kind of a view that is packed in a format."""
        return cls(fmt, b"" if view.order is None or fmt != view.dtype else view.order.tobytes())


class _WidenedViews(Sequence[TensorView]):
    """Views that turn to float32 only when they are looked at, so that one at a time is held."""

    def __init__(self, checkpoint: Checkpoint, views: Sequence[TensorView]) -> None:
        self._checkpoint = checkpoint
        self._views = views

    def __len__(self) -> int:
        return len(self._views)

    def __iter__(self) -> Iterator[TensorView]:
        for view in self._views:
            yield _widen(self._checkpoint, view)

    @overload
    def __getitem__(self, index: int) -> TensorView: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TensorView]: ...
    def __getitem__(self, index: int | slice) -> TensorView | Sequence[TensorView]:
        if isinstance(index, slice):
            return _WidenedViews(self._checkpoint, self._views[index])
        return _widen(self._checkpoint, self._views[index])


class WeightLoader:
    """Loads one model onto one device."""

    def __init__(
        self, device: OpsDevice, checkpoint: Checkpoint, dtype: str, fallback: str, quantize: str | None = None
    ) -> None:
        """Bind a loader.

        Args:
            device: where weights go.
            checkpoint: where they are.
            dtype: type of the activations.
            fallback: ``auto`` widens what no linear method takes, ``refuse`` raises.
            quantize: format that linear methods quantize weights to, or None to keep the checkpoint's.
        """
        self._quantize = quantize
        self._device = device
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._fallback = fallback
        self._widened: dict[tuple[str, str], set[str]] = {}
        self._ordered: set[str] = set()
        self._composites: list[str] = []
        self._used: set[str] = set()

    def load(self, model: Model, progress: Progress | None = None) -> Weights:
        """Load every parameter of ``model``.

        Raises:
            CheckpointError: a tensor is missing or has another shape than the model expects.
            UnsupportedError: a format is not taken and ``fallback`` refuses.
        """
        parameters = model.parameters()
        sizes = {parameter.name: self._source_bytes(parameter) for parameter in parameters}
        total, done = sum(sizes.values()), 0
        arrays: dict[str, Any] = {}
        num_bytes = 0
        for parameter in parameters:
            if parameter.tied_to is not None:
                arrays[parameter.name] = arrays[parameter.tied_to]
            elif parameter.kind is ParameterKind.VECTOR:
                arrays[parameter.name], size = self._vector(parameter)
                num_bytes += size
            else:
                packed = self._pack(parameter)
                arrays[parameter.name] = packed
                num_bytes += packed.num_bytes
            done += sizes[parameter.name]
            if progress is not None:
                progress(done, total)
        return Weights(arrays, num_bytes, tuple(self._notes()))

    def _source_bytes(self, parameter: Parameter) -> int:
        if parameter.tied_to is not None:
            return 0
        return sum(self._checkpoint.num_bytes(source.tensor) for source in (*parameter.sources, *parameter.bias))

    def _views(self, sources: Iterable[Source]) -> list[TensorView]:
        views = []
        for source in sources:
            self._used.add(source.tensor)
            view = self._checkpoint.tensor(source.tensor)
            views.append(view if source.rows is None else _rows(view, source.rows))
        return views

    def _vector(self, parameter: Parameter) -> tuple[Array, int]:
        values = self._values(parameter.sources)
        if values.size != parameter.shape[0]:
            raise CheckpointError(
                f"{parameter.name} must have {parameter.shape[0]} elements, but {_names(parameter.sources)} has "
                f"{values.size}. The checkpoint does not belong to its config."
            )
        if parameter.add:
            values = values + np.float32(parameter.add)
        return self._device.ops.from_host(values, "float32"), values.nbytes

    def _values(self, sources: Sequence[Source]) -> Float32Array:
        parts = [self._checkpoint.dequantize(view).reshape(-1) for view in self._views(sources)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _pack(self, parameter: Parameter) -> PackedWeight:
        out_features, in_features = parameter.shape
        views = self._views(parameter.sources)
        _check_shape(parameter, views)
        spec = LinearSpec(
            name=parameter.name,
            out_features=out_features,
            in_features=in_features,
            dtype=self._dtype,
            quantize=self._quantize,
        )
        bias = self._values(parameter.bias) if parameter.bias else None
        embedding = parameter.kind is ParameterKind.EMBEDDING
        formats = [self._format_on_device(view, spec, embedding=embedding) for view in views]
        kinds = [_Kind.of(view, fmt) for view, fmt in zip(views, formats, strict=True)]
        if len(set(kinds)) > 1 and (set(formats) <= DENSE_FORMATS or embedding):
            kinds = [_Kind(WIDENED)] * len(views)
        if len(set(kinds)) > 1:
            return self._composite(spec, views, kinds, bias)
        return self._pack_one(spec, views, kinds[0], bias)

    def _format_on_device(self, view: TensorView, spec: LinearSpec, *, embedding: bool) -> str:
        """The view's own format where a method takes it, else the one it is widened to."""
        reasons = []
        unordered = self._cannot_reorder(view, embedding)
        for method in () if unordered else self._device.linear_methods():
            reason = method.claims(view.dtype, spec)
            if reason is None:
                return view.dtype
            reasons.append(f"{method.name}: {reason}")
        why = unordered or "; ".join(reasons)
        if self._fallback == "refuse":
            raise UnsupportedError(
                f"{view.name} is {view.dtype}, which no linear of {self._device.info.name} takes ({why}). "
                "Pass --quantization-fallback auto to widen it at load, or choose a checkpoint in another format."
            )
        self._widened.setdefault((view.dtype, why), set()).add(view.name)
        return WIDENED

    def _cannot_reorder(self, view: TensorView, embedding: bool) -> str:
        """Why columns in another order cannot stay so; empty where they can, or are in order."""
        if view.order is None:
            return ""
        if embedding:
            return "its columns are in act-order, and its rows are looked up"
        if not self._device.ops.has_permute_columns:
            return "its columns are in act-order, and no kernel here brings activations into it"
        return ""

    def _method(self, fmt: str, spec: LinearSpec) -> LinearMethod:
        methods = self._device.linear_methods()
        return next((method for method in methods if method.claims(fmt, spec) is None), methods[-1])

    def _pack_one(
        self, spec: LinearSpec, views: Sequence[TensorView], kind: _Kind, bias: Float32Array | None
    ) -> PackedWeight:
        on_device = None if bias is None else self._device.ops.from_host(bias, "float32")
        order = views[0].order if kind.order else None
        if any(view.dtype != kind.fmt for view in views):
            views = _WidenedViews(self._checkpoint, views)
        elif order is not None:
            views = [replace(view, order=None) for view in views]
        packed = self._method(kind.fmt, spec).pack(views, spec, on_device)
        if order is None:
            return packed
        self._ordered.add(spec.name)
        return OrderedWeight(self._device.ops, packed, order)

    def _composite(
        self, spec: LinearSpec, views: Sequence[TensorView], kinds: Sequence[_Kind], bias: Float32Array | None
    ) -> PackedWeight:
        self._composites.append(spec.name)
        parts, first = [], 0
        for kind, run in groupby(zip(kinds, views, strict=True), key=lambda pair: pair[0]):
            members = [view for _, view in run]
            rows = sum(view.num_elements for view in members) // spec.in_features
            part = replace(spec, out_features=rows)
            parts.append(self._pack_one(part, members, kind, None if bias is None else bias[first : first + rows]))
            first += rows
        return CompositeWeight(self._device.ops, parts)

    def _notes(self) -> Iterator[str]:
        for (fmt, why), names in self._widened.items():
            target = self._dtype if self._quantize is None else f"float32 before they are quantized to {self._quantize}"
            yield f"{len(names)} tensors {fmt} widened to {target} at load ({why})"
        if self._composites:
            count = len(self._composites)
            first = self._composites[0]
            yield f"{count} fused linears kept in parts because their formats or orders differ, first {first}"
        if self._ordered:
            yield f"{len(self._ordered)} linears have columns in act-order; activations are brought into it"
        unused = sorted(set(self._checkpoint.names()) - self._used)
        if unused:
            shown = ", ".join(unused[:NAMES_SHOWN]) + (" …" if len(unused) > NAMES_SHOWN else "")
            yield f"{len(unused)} tensors of the checkpoint are not used: {shown}"


def _rows(view: TensorView, rows: tuple[int, int]) -> TensorView:
    """A range of rows of a tensor; rows lie one after the other in every format."""
    first, last = rows
    row_bytes = len(view.data) // view.shape[0]
    return replace(view, shape=(last - first, *view.shape[1:]), data=view.data[first * row_bytes : last * row_bytes])


def _widen(checkpoint: Checkpoint, view: TensorView) -> TensorView:
    values = np.ascontiguousarray(checkpoint.dequantize(view), dtype=np.float32)
    return replace(view, dtype=WIDENED, order=None, data=values.reshape(-1).view(np.uint8).data)


def _check_shape(parameter: Parameter, views: Sequence[TensorView]) -> None:
    out_features, in_features = parameter.shape
    counts = Counter(view.shape[-1] for view in views)
    rows = sum(view.num_elements for view in views) // in_features
    if set(counts) != {in_features} or rows != out_features:
        shapes = ", ".join(f"{view.name} {list(view.shape)}" for view in views)
        raise CheckpointError(
            f"{parameter.name} must be [{out_features}, {in_features}], but its tensors are {shapes}. "
            "The checkpoint does not belong to its config."
        )


def _names(sources: Sequence[Source]) -> str:
    return ", ".join(source.tensor for source in sources)
