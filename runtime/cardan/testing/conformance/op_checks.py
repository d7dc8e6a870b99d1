"""Every operation against its float64 reference: the cases of its spec and further shapes, rows apart, poisoned memory.

It knows no operation by name but for the shapes that its spec does not say.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from cardan.ops import OP_SPECS, DenseWeight, OpSpec, run_case
from cardan.ops.checking import Pack
from cardan.ops.definitions import NumpyArray
from cardan.platform import LinearSpec, OpsDevice
from cardan.testing.conformance.check import Check, CheckError
from cardan.testing.conformance.op_shapes import empty_case, long_cases, rows_with_nan, special_values
from cardan.testing.conformance.subject import Subject
from cardan.types import TensorView

SEED = 7
BENCHMARK_CALLS = 5
POISONS = 3
"""Arrays of each size that are filled with NaN and let go before an operation runs."""


def checks(subject: Subject) -> Iterator[Check]:
    """One check for each operation and type, and for what specs do not say."""
    for name, spec in OP_SPECS.items():
        for dtype in _dtypes(subject, spec):
            yield _check(f"{name}[{dtype}]", partial(_run_spec, spec=spec, dtype=dtype))
        yield _check(f"{name}-empty-batch", partial(_run_empty, spec=spec))
        if special_values(spec) or any(rows_with_nan(spec, np.random.default_rng(SEED))):
            yield _check(f"{name}-special-values", partial(_run_special, spec=spec))
    yield Check(part="ops", name="host-arrays-are-copied", run=_run_copies)


def _check(name: str, run: Callable[[Subject], None]) -> Check:
    return Check(part="ops", name=name, run=run)


def _dtypes(subject: Subject, spec: OpSpec) -> tuple[str, ...]:
    """Types to try: what samplers use is always float32."""
    if spec.dtypes == ("float32",):
        return spec.dtypes
    return tuple(dtype for dtype in subject.dtypes() if dtype in spec.dtypes)


def packer(device: OpsDevice) -> Pack:
    """Packs dense values through the device's last linear method, which takes dense formats."""

    def pack(values: NumpyArray, bias: NumpyArray | None, dtype: str) -> Any:
        rows = np.ascontiguousarray(values, dtype=np.float32)
        view = TensorView("weight", "F32", rows.shape, rows.reshape(-1).view(np.uint8).data)
        spec = LinearSpec(name="weight", out_features=rows.shape[0], in_features=rows.shape[1], dtype=dtype)
        on_device = None if bias is None else device.ops.from_host(bias.astype(np.float32), "float32")
        return device.linear_methods()[-1].pack((view,), spec, on_device)

    return pack


def _run_spec(subject: Subject, spec: OpSpec, dtype: str) -> None:
    rng = np.random.default_rng(SEED)
    for arguments in spec.cases(rng):
        _try(subject, spec, arguments, dtype)
    for arguments in long_cases(spec, rng, quick=subject.quick):
        _try(subject, spec, arguments, dtype)


def _run_empty(subject: Subject, spec: OpSpec) -> None:
    arguments = empty_case(spec, np.random.default_rng(SEED))
    _try(subject, spec, arguments, _best(subject, spec))


def _run_special(subject: Subject, spec: OpSpec) -> None:
    rng = np.random.default_rng(SEED)
    for arguments in (*special_values(spec), *rows_with_nan(spec, rng)):
        _try(subject, spec, arguments, _best(subject, spec))


def _best(subject: Subject, spec: OpSpec) -> str:
    return "float32" if spec.dtypes == ("float32",) else subject.best_dtype


def _try(subject: Subject, spec: OpSpec, arguments: tuple[Any, ...], dtype: str) -> None:
    """Run one case over memory that held NaN, and compare."""
    device = subject.ops
    ran = replace(spec, call=partial(_call_over_poison, spec, _sizes(arguments)))
    with device.scope(), np.errstate(all="ignore"):
        trial = run_case(device.ops, ran, arguments, dtype, packer(device))
        got, want = trial.got, trial.want
        if len(got) != len(want):
            raise CheckError(
                f"{spec.name} gives {len(got)} arrays, expected {len(want)}; arguments {_shapes(arguments)}"
            )
        for index, excess in enumerate(trial.excesses):
            if not excess <= 1:
                which = f" (result {index})" if len(want) > 1 else ""
                raise CheckError(
                    f"{spec.name} in {dtype}{which} is off by {excess:.3g} times what rounding explains; "
                    f"arguments {_shapes(arguments)}{_worst(got[index], want[index], trial.allowed[index])}"
                )


def _call_over_poison(spec: OpSpec, sizes: Sequence[tuple[int, ...]], ops: Any, *arguments: Any) -> Any:
    """Leave NaN in memory that allocators give out again, so that an element never written shows."""
    for shape in sizes:
        held = [ops.from_host(np.full(shape, np.nan, dtype=np.float32)) for _ in range(POISONS)]
        for array in held:
            ops.to_host(ops.scale(array, 1.0))
        del held
    return spec.call(ops, *arguments) if spec.call else getattr(ops, spec.name)(*arguments)


def _sizes(arguments: tuple[Any, ...]) -> list[tuple[int, ...]]:
    """Shapes that results of these arguments may have."""
    arrays = [item for item in arguments if isinstance(item, np.ndarray) and item.ndim and item.size]
    shapes = {array.shape for array in arrays}
    weights = [item for item in arguments if isinstance(item, DenseWeight)]
    shapes |= {(array.shape[0], weight.values.shape[0]) for array in arrays for weight in weights}
    return sorted(shapes)


def _shapes(arguments: tuple[Any, ...]) -> str:
    parts = []
    for item in arguments:
        if isinstance(item, DenseWeight):
            parts.append(f"weight {list(item.values.shape)}")
        elif isinstance(item, list):
            parts.append(" + ".join(str(list(array.shape)) for array in item))
        else:
            parts.append(str(list(item.shape)) if isinstance(item, np.ndarray) else repr(item))
    return ", ".join(parts)


def _worst(got: NumpyArray, want: NumpyArray, allowed: NumpyArray | float) -> str:
    """Where a result is off by most, and what stands there."""
    if got.shape != want.shape:
        return f"; the shape is {list(got.shape)}, expected {list(want.shape)}"
    excess = np.abs(got.astype(np.float64) - want) / np.maximum(allowed, 1e-300)
    excess = np.where((got == want) | (np.isnan(got) & np.isnan(want)), 0.0, np.nan_to_num(excess, nan=np.inf))
    place = tuple(int(i) for i in np.unravel_index(int(excess.argmax()), excess.shape))
    return f"; at {list(place)} got {got[place]!r}, expected {want[place]!r}"


def _run_copies(subject: Subject) -> None:
    """A host array that changes afterwards, and a result that is changed, leave the device's array as it is."""
    ops = subject.ops.ops
    array = np.ones((2, 3), np.float32)
    on_device = ops.from_host(array)
    array[:] = 2
    back = ops.to_host(on_device)
    if not (back == 1).all():
        raise CheckError("from_host shares memory with the host array, which the engine changes afterwards; copy it")
    writable = np.array(back)
    writable[:] = 5
    if back.flags.writeable:
        back[:] = 5
    if not (ops.to_host(on_device) == 1).all():
        raise CheckError("to_host gives out the device's own memory; copy it")


def benchmark(subject: Subject) -> dict[str, float]:
    """Median microseconds of one call of each operation, its results brought to the host."""
    device = subject.ops
    times: dict[str, float] = {}
    for name, spec in OP_SPECS.items():
        arguments = max(spec.cases(np.random.default_rng(SEED)), key=_elements)
        seconds: list[float] = []
        timed = replace(spec, call=partial(_timed_call, spec, seconds))
        # an operation that raises was reported by its check
        with contextlib.suppress(Exception), device.scope(), np.errstate(all="ignore"):
            run_case(device.ops, timed, arguments, _best(subject, spec), packer(device))
        if seconds:
            times[name] = statistics.median(seconds) * 1e6
    return times


def _elements(arguments: tuple[Any, ...]) -> int:
    return sum(item.size for item in arguments if isinstance(item, np.ndarray)) + sum(
        item.values.size for item in arguments if isinstance(item, DenseWeight)
    )


def _timed_call(spec: OpSpec, seconds: list[float], ops: Any, *arguments: Any) -> Any:
    result = None
    for _ in range(BENCHMARK_CALLS):
        start_s = time.perf_counter()
        result = spec.call(ops, *arguments) if spec.call else getattr(ops, spec.name)(*arguments)
        for array in result if isinstance(result, tuple | list) else (result,):
            ops.to_host(array)
        seconds.append(time.perf_counter() - start_s)
    return result
