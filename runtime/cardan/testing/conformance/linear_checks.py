"""Linear methods: every weight format that a platform claims, against exact dequantization.

It knows no format: values come from ``cardan.quantization``, blocks without a writer are drawn at random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from cardan.ops import at_most, round_to
from cardan.ops.definitions import NumpyArray
from cardan.ops.rounding import ROUNDOFF, SMALLEST, gamma
from cardan.platform import ActivationCodes, LinearMethod, LinearSpec, OpsDevice, Requantized, Support
from cardan.quantization import FORMATS, WRITABLE_FORMATS, dequantize, quantize
from cardan.testing.conformance.check import Check, CheckError, NotApplicableError, expect
from cardan.testing.conformance.op_shapes import OUTER_SIZES
from cardan.testing.conformance.subject import Subject
from cardan.types import TensorView

DENSE = ("F32", "F16", "BF16")
HELD = {"float32": DENSE, "float16": ("F16",), "bfloat16": ("BF16",)}
"""Dense formats whose values a type of activations holds, so that none is rounded."""
MANY_COLUMNS = 2048
"""Enough that a sum over them shows whether a tail of a few is left out."""
DENSE_COLUMNS = (1, 7, 31, 33, 63, 65, 127, 160, MANY_COLUMNS)
TOKENS = (1, 2, 8, 17)
BLOCK_ROUNDINGS = 6
"""Of the activations' type, of the largest weight of a group: code times scale and the offset are each at most twice
that, the scale and the product are rounded once each, the offset once, and their sum once."""
RESULT_ROUNDINGS = 2
"""Of the activations' type: the sum, and with the bias."""
LARGEST = 4.0
"""Drawn blocks have values up to this."""


def checks(subject: Subject) -> Iterator[Check]:
    """One check for each dense format and for each format that the platform claims to multiply as it is."""
    claimed = subject.capabilities.family("weights")
    native = [fmt for fmt in claimed if subject.capabilities.get(f"weights:{fmt}").support is Support.NATIVE]
    for fmt in dict.fromkeys((*DENSE, *native)):
        for dtype in subject.dtypes():
            yield Check(part="linear", name=f"{fmt}[{dtype}]", run=partial(_run_format, fmt=fmt, dtype=dtype))
        yield Check(part="linear", name=f"{fmt}-rows-of-several-tensors", run=partial(_run_parts, fmt=fmt))
    for fmt in claimed:
        if fmt not in DENSE and fmt not in native:
            yield Check(part="linear", name=f"{fmt}-requantized", run=partial(_run_requantized, fmt=fmt))
    for made in subject.capabilities.family("quantize"):
        for dtype in subject.dtypes():
            run = partial(_run_made_at_load, made=made, dtype=dtype)
            yield Check(part="linear", name=f"made-at-load-{made}[{dtype}]", run=run)
    yield Check(part="linear", name="padding-of-inner-sizes", run=_run_padding)


def claiming(device: OpsDevice, fmt: str, spec: LinearSpec) -> LinearMethod:
    """The first linear method that takes a format.

    Raises:
        CheckError: none does.
    """
    reasons = []
    for method in device.linear_methods():
        reason = method.claims(fmt, spec)
        if reason is None:
            return method
        reasons.append(f"{method.name}: {reason}")
    raise CheckError(
        f"the platform claims weights:{fmt}, but no linear method takes it for [{spec.out_features}, "
        f"{spec.in_features}] in {spec.dtype} ({'; '.join(reasons) or 'it has none'})"
    )


def make_view(fmt: str, rows: int, columns: int, rng: np.random.Generator) -> TensorView:
    """A random tensor ``[rows, columns]`` of a format.

    Raises:
        NotApplicableError: there is no neutral description of the format.
    """
    spec = FORMATS.get(fmt)
    if spec is None:
        raise NotApplicableError(f"cardan.quantization has no description of {fmt} to compare with")
    if fmt in WRITABLE_FORMATS:
        data = quantize(rng.normal(size=(rows, columns)).astype(np.float32), fmt)
        return TensorView(f"random.{fmt}", fmt, (rows, columns), memoryview(data))
    count = rows * columns // spec.block_elements
    blocks = np.zeros((0, spec.block_bytes), np.uint8)
    while len(blocks) < count:
        drawn = rng.integers(0, 256, (4 * count + 64, spec.block_bytes), dtype=np.uint8)
        view = TensorView("drawn", fmt, (len(drawn), spec.block_elements), drawn.reshape(-1).data)
        values = np.abs(dequantize(view)).max(axis=1)
        blocks = np.concatenate((blocks, drawn[np.isfinite(values) & (values < LARGEST) & (values > 1e-3)]))
    return TensorView(f"random.{fmt}", fmt, (rows, columns), np.ascontiguousarray(blocks[:count]).reshape(-1).data)


def _columns(fmt: str) -> tuple[int, ...]:
    spec = FORMATS.get(fmt)
    if spec is None or spec.block_elements == 1:
        return DENSE_COLUMNS
    # packages of several blocks, of one, and of counts that no tile divides
    return (*(spec.block_elements * blocks for blocks in (1, 3, 5, 8)), MANY_COLUMNS)


def _run_format(subject: Subject, fmt: str, dtype: str) -> None:
    rng = np.random.default_rng(11)
    for index, columns in enumerate(_columns(fmt)):
        rows = OUTER_SIZES[index % len(OUTER_SIZES)]
        view = make_view(fmt, rows, columns, rng)
        bias = rng.normal(size=rows).astype(np.float32) if index % 2 else None
        _try(subject, (view,), dtype, bias, rng)


def _run_parts(subject: Subject, fmt: str) -> None:
    """Rows of three tensors, one after the other, as fused projections have them."""
    rng = np.random.default_rng(12)
    columns = _columns(fmt)[1]
    views = tuple(make_view(fmt, rows, columns, rng) for rows in (5, 1, 12))
    _try(subject, views, subject.best_dtype, None, rng)


def _run_requantized(subject: Subject, fmt: str) -> None:
    """A format that is emulated: widened by the loader, or all the same taken by a linear method."""
    spec = LinearSpec(name="weight", out_features=12, in_features=256, dtype=subject.best_dtype)
    if all(method.claims(fmt, spec) is not None for method in subject.ops.linear_methods()):
        raise NotApplicableError("no linear method takes the format, so the loader widens it exactly")
    rng = np.random.default_rng(14)
    _try(subject, (make_view(fmt, 12, 256, rng),), subject.best_dtype, None, rng)


def _run_made_at_load(subject: Subject, made: str, dtype: str) -> None:
    """Dense weights that ``--quantization`` has quantized as they are loaded."""
    rng = np.random.default_rng(15)
    said = subject.capabilities.get(f"quantize:{made}").requantized
    if said is None:
        raise CheckError(f"quantize:{made} is claimed; say with Capability(requantized=...) in how many bits")
    for rows, groups in ((1, 1), (31, 3), (12, 16)):
        _try(subject, (make_view("F32", rows, groups * said.group, rng),), dtype, None, rng, made=made)


def _run_padding(subject: Subject) -> None:
    """Every inner size from 1 to 70, with activations that leave NaN behind in memory."""
    device, dtype = subject.ops, subject.best_dtype
    rng = np.random.default_rng(13)
    for columns in range(1, 71):
        held = device.ops.from_host(np.full((17, -(-columns // 32) * 32), np.nan, np.float32), dtype)
        device.ops.to_host(held)
        del held
        _try(subject, (make_view("F32", 3, columns, rng),), dtype, None, rng)


def _try(
    subject: Subject,
    views: tuple[TensorView, ...],
    dtype: str,
    bias: NumpyArray | None,
    rng: np.random.Generator,
    *,
    made: str | None = None,
) -> None:
    device, fmt = subject.ops, views[0].dtype
    columns, rows = views[0].shape[1], sum(view.shape[0] for view in views)
    spec = LinearSpec(name="weight", out_features=rows, in_features=columns, dtype=dtype, quantize=made)
    ops = device.ops
    with device.scope():
        method = claiming(device, fmt, spec)
        codes = method.activation_codes(fmt, spec)
        weight = method.pack(views, spec, None if bias is None else ops.from_host(bias, "float32"))
        exact = np.concatenate([dequantize(view) for view in views]).astype(np.float64)
        shift = np.zeros(rows) if bias is None else round_to(bias.astype(np.float64), dtype)
        expect(weight.num_bytes > 0, f"{method.name} says that {fmt} weights take {weight.num_bytes} bytes")
        answer = subject.capabilities.get(f"weights:{fmt}" if made is None else f"quantize:{made}")
        off = weight_bound(exact, fmt, dtype, answer.requantized)
        if made is not None and answer.requantized is not None:
            # quantizers keep a code for 0, for which they move the ends of a group by up to half a step
            off += half_steps(exact, answer.requantized)
        for tokens in TOKENS:
            x = round_to(rng.normal(size=(tokens, columns)), dtype)
            got = ops.to_host(weight.apply(ops.from_host(x.astype(np.float32), dtype)))
            allowed = result_bound(x, exact, shift, off, dtype)
            if codes is not None:
                allowed += activation_bound(x, codes) @ (np.abs(exact) + off).T
            _compare(got, x @ exact.T + shift, allowed, f"{method.name} of {made or fmt} [{rows}, {columns}]")
        ids = rng.integers(0, rows, 4).astype(np.int32)
        gathered = ops.to_host(weight.gather(ops.from_host(ids))).astype(np.float64)
        rows_off = row_bound(exact, off, fmt, dtype) if answer.requantized is None else off
        _compare(gathered, exact[ids], rows_off[ids], f"{method.name}: rows gathered of {made or fmt}")


def result_bound(x: NumpyArray, weight: NumpyArray, bias: NumpyArray, off: NumpyArray, dtype: str) -> NumpyArray:
    """How far each result ``x @ weight.T + bias`` may be off whose weights are off by up to ``off``.

    Products are added up in float32 at least, and the bias with them; the result is rounded to the type.

    Source: Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019, theorem 3.1.
    """
    sizes = np.abs(x) @ np.abs(weight).T + np.abs(bias)
    want = np.abs(x @ weight.T + bias)
    rounded = RESULT_ROUNDINGS * (ROUNDOFF[dtype] * (want + np.abs(bias)) + SMALLEST[dtype])
    allowed: NumpyArray = np.abs(x) @ off.T + gamma(x.shape[1] + 1, want.size) * sizes + rounded
    return allowed


def weight_bound(weight: NumpyArray, fmt: str, dtype: str, packed: Requantized | None = None) -> NumpyArray:
    """How far each value of a weight ``[rows, columns]`` may be off once it is packed for activations of a type.

    Dense values are rounded to the type, if at all. Codes of a group have a scale, and may have an offset. Where they
    are packed in others, that moves each by up to half a step more.
    """
    half_step = 0.0 if packed is None else half_steps(weight, packed)
    group = FORMATS[fmt].group if packed is None else packed.group
    if fmt in DENSE and packed is None:
        return np.zeros_like(weight) if fmt in HELD[dtype] else ROUNDOFF[dtype] * np.abs(weight) + SMALLEST[dtype]
    largest = _by_group(np.abs(weight), group, np.max)
    allowed: NumpyArray = BLOCK_ROUNDINGS * (ROUNDOFF[dtype] * largest + SMALLEST[dtype]) + half_step
    return allowed


def row_bound(weight: NumpyArray, off: NumpyArray, fmt: str, dtype: str) -> NumpyArray:
    """How far each value of a row may be off where rows are gathered.

    Float32 holds a code of up to 8 bits times a scale of 16, so that only the sum with the offset is rounded.
    """
    exact = fmt not in DENSE and "float32" not in FORMATS[fmt].scale
    allowed: NumpyArray = ROUNDOFF[dtype] * np.abs(weight) if exact and dtype == "float32" else off
    return allowed


def half_steps(weight: NumpyArray, packed: Requantized) -> NumpyArray:
    """How far each value of a weight ``[rows, columns]`` may move where it is packed in another format."""
    steps: NumpyArray = _by_group(weight, packed.group, np.ptp) / (2**packed.bits - 1)
    return steps / 2


def _by_group(values: NumpyArray, group: int, reduce: Callable[..., NumpyArray]) -> NumpyArray:
    """What ``reduce`` gives for each group of columns, at every column of it."""
    out = np.empty_like(values)
    for start in range(0, values.shape[1], group):
        columns = slice(start, start + group)
        out[:, columns] = reduce(values[:, columns], axis=1)[:, None]
    return out


def activation_bound(x: NumpyArray, codes: ActivationCodes) -> NumpyArray:
    """How far each activation ``[tokens, columns]`` may move where a method quantizes them: half a step of its group.

    The quotient by the step, and the step, may be rounded once each in float32.
    """
    group = codes.group or max(x.shape[1], 1)
    allowed: NumpyArray = _by_group(np.abs(x), group, np.max) * (0.5 / codes.largest + 2 * ROUNDOFF["float32"])
    return allowed


def _compare(got: NumpyArray, want: NumpyArray, allowed: NumpyArray, what: str) -> None:
    expect(got.shape == want.shape, f"{what} gives {list(got.shape)}, expected {list(want.shape)}")
    broken = int((~np.isfinite(got)).sum())
    expect(broken == 0, f"{what}: {broken} of {got.size} results are NaN or infinite with {len(got)} rows")
    excess = at_most(got, want, allowed)
    expect(excess <= 1, f"{what} is off by {excess:.3g} times what rounding explains, with {len(got)} rows")
