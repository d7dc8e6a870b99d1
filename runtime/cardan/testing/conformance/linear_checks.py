"""Linear methods: every weight format that a platform claims, against exact dequantization.

It knows no format: values come from ``cardan.quantization``, blocks without a writer are drawn at random.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from cardan.ops import round_to
from cardan.ops.definitions import NumpyArray
from cardan.ops.rounding import ROUNDOFF
from cardan.platform import ActivationCodes, LinearMethod, LinearSpec, OpsDevice, Support
from cardan.quantization import FORMATS, WRITABLE_FORMATS, dequantize, quantize
from cardan.testing.conformance.check import Check, CheckError, NotApplicableError, expect
from cardan.testing.conformance.subject import Subject
from cardan.types import TensorView

DENSE = ("F32", "F16", "BF16")
OUTER_SIZES = (1, 5, 31, 64)
DENSE_COLUMNS = (1, 7, 31, 33, 63, 65, 127, 160)
TOKENS = (1, 2, 8, 17)
BLOCK_ROUNDINGS = 6
"""Of the activations' type, of the largest weight of a block: code times scale and the offset are each at most twice
that, the scale and the product are rounded once each, the offset once, and their sum once. A dense weight is rounded
once itself."""
RESULT_ROUNDINGS = 2
"""Of the activations' type, of sum |x| |w|: the result, and its sum with the bias. Before that, products are added up
in float32 at least, where every term is rounded at most once for each column (Higham, Accuracy and Stability of
Numerical Algorithms, section 4.2)."""
REQUANTIZED_GROUP, REQUANTIZED_STEPS = 128, 255
"""A format that is packed in another may move a weight by half a step of 8 bits over the range of this many columns."""
LARGEST = 4.0
"""Drawn blocks have values up to this."""


def checks(subject: Subject) -> Iterator[Check]:
    """One check for each dense format and for each format that the platform claims to multiply as it is."""
    native = [fmt for fmt in subject.capabilities.family("weights") if _exact(subject, fmt)]
    for fmt in dict.fromkeys((*DENSE, *native)):
        for dtype in subject.dtypes():
            yield Check(part="linear", name=f"{fmt}[{dtype}]", run=partial(_run_format, fmt=fmt, dtype=dtype))
        yield Check(part="linear", name=f"{fmt}-rows-of-several-tensors", run=partial(_run_parts, fmt=fmt))
    for fmt in subject.capabilities.family("weights"):
        if fmt not in DENSE and fmt not in native:
            yield Check(part="linear", name=f"{fmt}-requantized", run=partial(_run_requantized, fmt=fmt))
    yield Check(part="linear", name="padding-of-inner-sizes", run=_run_padding)


def _exact(subject: Subject, fmt: str) -> bool:
    """Whether a format is multiplied as it is, and keeps its values."""
    answer = subject.capabilities.get(f"weights:{fmt}")
    return answer.support is Support.NATIVE and answer.exact


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
    return tuple(spec.block_elements * blocks for blocks in (1, 3, 5, 8))


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
    """A format that is not taken as it is: widened by the loader, or packed in another by a linear method."""
    spec = LinearSpec(name="weight", out_features=12, in_features=256, dtype=subject.best_dtype)
    if all(method.claims(fmt, spec) is not None for method in subject.ops.linear_methods()):
        raise NotApplicableError("no linear method takes the format, so the loader widens it exactly")
    rng = np.random.default_rng(14)
    _try(subject, (make_view(fmt, 12, 256, rng),), subject.best_dtype, None, rng, lossy=True)


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
    lossy: bool = False,
) -> None:
    device, fmt = subject.ops, views[0].dtype
    columns, rows = views[0].shape[1], sum(view.shape[0] for view in views)
    spec = LinearSpec(name="weight", out_features=rows, in_features=columns, dtype=dtype)
    ops = device.ops
    with device.scope():
        method = claiming(device, fmt, spec)
        codes = method.activation_codes(fmt, spec)
        weight = method.pack(views, spec, None if bias is None else ops.from_host(bias, "float32"))
        exact = np.concatenate([dequantize(view) for view in views]).astype(np.float64)
        expect(weight.num_bytes > 0, f"{method.name} says that {fmt} weights take {weight.num_bytes} bytes")
        off = weight_bound(exact, fmt, dtype) + (half_steps(exact) if lossy else 0.0)
        for tokens in TOKENS:
            x = round_to(rng.normal(size=(tokens, columns)), dtype)
            got = ops.to_host(weight.apply(ops.from_host(x.astype(np.float32), dtype)))
            want = x @ exact.T + (0.0 if bias is None else round_to(bias.astype(np.float64), dtype))
            size = np.abs(x) @ np.abs(exact).T + (0.0 if bias is None else np.abs(bias))
            sums = RESULT_ROUNDINGS * ROUNDOFF[dtype] + (columns + 1) * ROUNDOFF["float32"]
            allowed = np.abs(x) @ off.T + sums * size
            if codes is not None:
                allowed += activation_bound(x, codes) @ (np.abs(exact) + off).T
            _compare(got, want, allowed, f"{method.name} of {fmt} [{rows}, {columns}]")
        ids = rng.integers(0, rows, 4).astype(np.int32)
        gathered = ops.to_host(weight.gather(ops.from_host(ids))).astype(np.float64)
        _compare(gathered, exact[ids], off[ids], f"{method.name}: rows gathered of {fmt}")


def weight_bound(weight: NumpyArray, fmt: str, dtype: str) -> NumpyArray:
    """How far each value of a weight ``[rows, columns]`` may be off when it was brought to the activations' type."""
    if fmt in DENSE:
        return ROUNDOFF[dtype] * np.abs(weight)
    blocks = np.abs(weight).reshape(weight.shape[0], -1, FORMATS[fmt].block_elements)
    largest = np.broadcast_to(blocks.max(axis=2, keepdims=True), blocks.shape)
    return BLOCK_ROUNDINGS * ROUNDOFF[dtype] * largest.reshape(weight.shape)


def activation_bound(x: NumpyArray, codes: ActivationCodes) -> NumpyArray:
    """How far each activation ``[tokens, columns]`` may move where a method quantizes them: half a step of its group.

    The largest magnitude has the code ``2^(bits - 1) - 1``; the quotient may be rounded once in float32.
    """
    most = 2 ** (codes.bits - 1) - 1
    allowed = np.empty_like(x)
    for start in range(0, x.shape[1], codes.group):
        largest = np.abs(x[:, start : start + codes.group]).max(axis=1, keepdims=True)
        allowed[:, start : start + codes.group] = largest * (0.5 / most + 2 * ROUNDOFF["float32"])
    return allowed


def half_steps(weight: NumpyArray) -> NumpyArray:
    """How far each value of a weight ``[rows, columns]`` may move where its format is packed in another of 8 bits."""
    allowed = np.empty_like(weight)
    for start in range(0, weight.shape[1], REQUANTIZED_GROUP):
        group = weight[:, start : start + REQUANTIZED_GROUP]
        allowed[:, start : start + REQUANTIZED_GROUP] = np.ptp(group, axis=1)[:, None] / (2 * REQUANTIZED_STEPS)
    return allowed


def _compare(got: NumpyArray, want: NumpyArray, allowed: NumpyArray, what: str) -> None:
    expect(got.shape == want.shape, f"{what} gives {list(got.shape)}, expected {list(want.shape)}")
    broken = int((~np.isfinite(got)).sum())
    expect(broken == 0, f"{what}: {broken} of {got.size} results are NaN or infinite with {len(got)} rows")
    excess = float((np.abs(got - want) / np.maximum(allowed, 1e-30)).max(initial=0.0))
    expect(excess <= 1, f"{what} is off by {excess:.1f} times what rounding explains, with {len(got)} rows")
