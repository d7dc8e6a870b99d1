"""The ``OpSpec`` of every operation: axes, dtypes, float64 reference, bounds and cases.

It knows no platform. Documentation, the conformance suite and micro-benchmarks read these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cardan.ops import bounds, cases, definitions, philox
from cardan.ops.definitions import NumpyArray
from cardan.ops.opspec import FLOAT32, Input, OpSpec, Role, activation, float32, index, packed, values
from cardan.ops.reference import DenseWeight

X = activation("x", "... features")
LOGITS = float32("x", "rows columns")
ROPE_INPUTS = (
    activation("x", "tokens heads dim"),
    index("positions", "tokens"),
    float32("cos", "context half"),
    float32("sin", "context half"),
    *values("interleaved"),
)


def _embed(ids: NumpyArray, table: DenseWeight) -> NumpyArray:
    return table.gather(ids)


def _linear(x: NumpyArray, weight: DenseWeight) -> NumpyArray:
    return weight.apply(x)


def _linear_add(x: NumpyArray, weight: DenseWeight, residual: NumpyArray) -> NumpyArray:
    return weight.apply(x) + residual


def _identity(x: NumpyArray, *ignored: Any) -> NumpyArray:
    return x


def _concat(xs: list[NumpyArray]) -> NumpyArray:
    return np.concatenate(xs, axis=-1)


def _gather_rows(x: NumpyArray, index: NumpyArray) -> NumpyArray:
    return x[index]


def _permute_columns(x: NumpyArray, order: NumpyArray) -> NumpyArray:
    return np.take(x, order, axis=1)


def _take_columns(x: NumpyArray, index: NumpyArray) -> NumpyArray:
    return np.take_along_axis(x, index.astype(np.int64), axis=-1)


def _add_rms_norm(x: NumpyArray, residual: NumpyArray, weight: NumpyArray, eps: float) -> tuple[NumpyArray, NumpyArray]:
    return definitions.rms_norm(x + residual, weight, eps), x + residual


def _silu_mul(gate_up: NumpyArray, size: int) -> NumpyArray:
    out: NumpyArray = definitions.silu(gate_up[:, :size]) * gate_up[:, size:]
    return out


def _gelu_mul(gate_up: NumpyArray, size: int, approximate: bool) -> NumpyArray:
    out: NumpyArray = definitions.gelu(gate_up[:, :size], approximate) * gate_up[:, size:]
    return out


def _on_device(ops: Any, x: Any) -> Any:
    """``to_host`` is what brings every result back, so that there is nothing to call."""
    return x


def _rope_in_two_steps(ops: Any, x: Any, positions: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    return ops.rope_apply(x, ops.rope_prepare(positions, cos, sin, interleaved))


_HOST_AND_DEVICE = (
    OpSpec(
        name="from_host",
        inputs=(Input("array", "...", Role.HOST), *values("dtype")),
        outputs=("...",),
        reference=_identity,
        cases=cases.host_arrays,
        dtypes=FLOAT32,
    ),
    OpSpec(
        name="to_host",
        inputs=(X,),
        outputs=("... features",),
        reference=_identity,
        cases=cases.rows,
        call=_on_device,
    ),
    OpSpec(
        name="cast",
        inputs=(X, *values("dtype")),
        outputs=("... features",),
        reference=_identity,
        cases=cases.with_value("float32"),
    ),
)

_LAYERS = (
    OpSpec(
        name="embed",
        inputs=(index("ids", "tokens"), packed("table")),
        outputs=("tokens in",),
        reference=_embed,
        cases=cases.embeddings,
    ),
    OpSpec(
        name="linear",
        inputs=(activation("x", "tokens in"), packed("weight")),
        outputs=("tokens out",),
        reference=_linear,
        bound=bounds.linear,
        cases=cases.linears,
    ),
    OpSpec(
        name="add",
        inputs=(activation("a", "... features"), activation("b", "... features")),
        outputs=("... features",),
        reference=np.add,
        bound=bounds.rounded,
        cases=cases.pairs,
    ),
    OpSpec(
        name="mul",
        inputs=(activation("a", "... features"), activation("b", "... features")),
        outputs=("... features",),
        reference=np.multiply,
        bound=bounds.rounded,
        cases=cases.pairs,
    ),
    OpSpec(
        name="scale",
        inputs=(X, *values("factor")),
        outputs=("... features",),
        reference=np.multiply,
        bound=bounds.rounded,
        cases=cases.with_value(0.125, 12.0, -3.0),
    ),
    OpSpec(
        name="rms_norm",
        inputs=(X, activation("weight", "features"), *values("eps")),
        outputs=("... features",),
        reference=definitions.rms_norm,
        bound=bounds.rms_norm,
        cases=cases.norms,
    ),
    OpSpec(
        name="layer_norm",
        inputs=(X, activation("weight", "features"), activation("bias", "features"), *values("eps")),
        outputs=("... features",),
        reference=definitions.layer_norm,
        bound=bounds.layer_norm,
        cases=cases.layer_norms,
    ),
    OpSpec(
        name="silu",
        inputs=(X,),
        outputs=("... features",),
        reference=definitions.silu,
        bound=bounds.gate,
        cases=cases.rows,
    ),
    OpSpec(
        name="gelu",
        inputs=(X, *values("approximate")),
        outputs=("... features",),
        reference=definitions.gelu,
        bound=bounds.gate,
        cases=cases.with_value(False, True),
    ),
    OpSpec(
        name="tanh_softcap",
        inputs=(X, *values("cap")),
        outputs=("... features",),
        reference=definitions.tanh_softcap,
        bound=bounds.tanh_softcap,
        cases=cases.with_value(1.5, 30.0),
    ),
    OpSpec(
        name="rope",
        inputs=ROPE_INPUTS,
        outputs=("tokens heads dim",),
        reference=definitions.rope,
        bound=bounds.rope,
        cases=cases.rotations,
    ),
    OpSpec(
        name="split",
        inputs=(X, *values("sizes")),
        outputs=("... size",),
        reference=definitions.split,
        cases=cases.splits,
    ),
    OpSpec(
        name="concat",
        inputs=(activation("xs", "... features"),),
        outputs=("... features",),
        reference=_concat,
        cases=cases.joins,
    ),
    OpSpec(
        name="split_heads",
        inputs=(activation("x", "tokens features"), *values("heads")),
        outputs=("tokens heads dim",),
        reference=definitions.split_heads,
        cases=cases.flat_heads,
    ),
    OpSpec(
        name="merge_heads",
        inputs=(activation("x", "tokens heads dim"),),
        outputs=("tokens features",),
        reference=definitions.merge_heads,
        cases=cases.heads,
    ),
    OpSpec(
        name="reshape",
        inputs=(activation("x", "..."), *values("shape")),
        outputs=("...",),
        reference=np.reshape,
        cases=cases.reshapes,
    ),
    OpSpec(
        name="gather_rows",
        inputs=(activation("x", "rows ..."), index("index", "n")),
        outputs=("n ...",),
        reference=_gather_rows,
        cases=cases.gathers,
    ),
    OpSpec(
        name="scatter_rows",
        inputs=(activation("x", "rows ..."), index("index", "n"), activation("values", "n ...")),
        outputs=("rows ...",),
        reference=definitions.scatter_rows,
        cases=cases.scatters,
    ),
)

_SAMPLING = (
    OpSpec(
        name="where",
        inputs=(
            Input("condition", "rows columns", Role.BOOL),
            float32("a", "rows columns"),
            float32("b", "rows columns"),
        ),
        outputs=("rows columns",),
        reference=definitions.where,
        cases=cases.conditions,
        dtypes=FLOAT32,
    ),
    OpSpec(
        name="compare",
        inputs=(float32("a", "rows columns"), *values("relation"), float32("b", "rows columns")),
        outputs=("rows columns",),
        reference=definitions.compare,
        cases=cases.operators(*definitions.COMPARISONS),
        dtypes=FLOAT32,
    ),
    OpSpec(
        name="arithmetic",
        inputs=(float32("a", "rows columns"), *values("operation"), float32("b", "rows columns")),
        outputs=("rows columns",),
        reference=definitions.arithmetic,
        bound=bounds.arithmetic,
        cases=cases.operators(*definitions.ARITHMETIC),
        dtypes=FLOAT32,
    ),
    OpSpec(
        name="is_nan",
        inputs=(LOGITS,),
        outputs=("rows",),
        reference=definitions.is_nan,
        cases=cases.nans,
        dtypes=FLOAT32,
    ),
    OpSpec(
        name="log_softmax",
        inputs=(LOGITS,),
        outputs=("rows columns",),
        reference=definitions.log_softmax,
        bound=bounds.log_softmax,
        cases=cases.logits,
        dtypes=FLOAT32,
    ),
    OpSpec(
        name="logsumexp",
        inputs=(LOGITS,),
        outputs=("rows",),
        reference=definitions.logsumexp,
        bound=bounds.logsumexp,
        cases=cases.logits,
        dtypes=FLOAT32,
    ),
    OpSpec(
        name="argmax",
        inputs=(LOGITS,),
        outputs=("rows",),
        reference=definitions.argmax,
        cases=cases.logits,
        dtypes=FLOAT32,
    ),
    OpSpec(
        name="topk",
        inputs=(LOGITS, *values("k")),
        outputs=("rows k", "rows k"),
        reference=definitions.topk,
        cases=cases.topks,
        dtypes=FLOAT32,
    ),
    OpSpec(
        name="cumsum",
        inputs=(LOGITS,),
        outputs=("rows columns",),
        reference=definitions.cumsum,
        bound=bounds.cumsum,
        cases=cases.probabilities,
        dtypes=FLOAT32,
    ),
    OpSpec(
        name="exp",
        inputs=(LOGITS,),
        outputs=("rows columns",),
        reference=np.exp,
        bound=bounds.exp,
        cases=cases.logits,
        dtypes=FLOAT32,
    ),
    OpSpec(
        name="take_columns",
        inputs=(LOGITS, index("index", "rows k")),
        outputs=("rows k",),
        reference=_take_columns,
        cases=cases.columns,
        dtypes=FLOAT32,
    ),
    OpSpec(
        name="scatter_add",
        inputs=(LOGITS, index("rows", "m"), index("columns", "m"), float32("values", "m")),
        outputs=("rows columns",),
        reference=definitions.scatter_add,
        bound=bounds.scatter_add,
        cases=cases.sparse_sums,
        dtypes=FLOAT32,
    ),
    OpSpec(
        name="unpack_bits",
        inputs=(index("mask", "rows words"), *values("columns")),
        outputs=("rows columns",),
        reference=definitions.unpack_bits,
        cases=cases.masks,
        dtypes=FLOAT32,
    ),
    OpSpec(
        name="gumbel",
        inputs=(Input("seeds", "rows", Role.HOST), Input("positions", "rows", Role.HOST), index("ids", "rows k")),
        outputs=("rows k",),
        reference=philox.gumbel,
        bound=bounds.gumbel,
        cases=cases.noises,
        dtypes=FLOAT32,
    ),
)

_RANKS_AND_FUSED = (
    OpSpec(
        name="all_reduce",
        inputs=(X,),
        outputs=("... features",),
        reference=_identity,
        cases=cases.rows,
    ),
    OpSpec(
        name="all_gather",
        inputs=(X,),
        outputs=("... features",),
        reference=_identity,
        cases=cases.rows,
    ),
    OpSpec(
        name="rope_apply",
        inputs=ROPE_INPUTS,
        outputs=("tokens heads dim",),
        reference=definitions.rope,
        bound=bounds.rope,
        cases=cases.rotations,
        call=_rope_in_two_steps,
        covers=("rope_prepare", "rope_apply"),
    ),
    OpSpec(
        name="linear_add",
        inputs=(activation("x", "tokens in"), packed("weight"), activation("residual", "tokens out")),
        outputs=("tokens out",),
        reference=_linear_add,
        bound=bounds.linear_add,
        composed=bounds.linear_add_composed,
        cases=cases.residual_linears,
    ),
    OpSpec(
        name="linear_float32",
        inputs=(activation("x", "tokens in"), packed("weight")),
        outputs=("tokens out",),
        reference=_linear,
        bound=bounds.linear_float32,
        composed=bounds.linear,
        cases=cases.linears,
    ),
    OpSpec(
        name="permute_columns",
        inputs=(activation("x", "tokens features"), index("order", "features")),
        outputs=("tokens features",),
        reference=_permute_columns,
        cases=cases.permutations,
    ),
    OpSpec(
        name="add_rms_norm",
        inputs=(X, activation("residual", "... features"), activation("weight", "features"), *values("eps")),
        outputs=("... features", "... features"),
        reference=_add_rms_norm,
        bound=bounds.add_rms_norm,
        cases=cases.residual_norms,
    ),
    OpSpec(
        name="silu_mul",
        inputs=(activation("gate_up", "tokens features"), *values("size")),
        outputs=("tokens size",),
        reference=_silu_mul,
        bound=bounds.silu_mul,
        cases=cases.gated(),
    ),
    OpSpec(
        name="gelu_mul",
        inputs=(activation("gate_up", "tokens features"), *values("size", "approximate")),
        outputs=("tokens size",),
        reference=_gelu_mul,
        bound=bounds.gelu_mul,
        cases=cases.gated(True),
    ),
)

OP_SPECS: Mapping[str, OpSpec] = {
    spec.name: spec for spec in (*_HOST_AND_DEVICE, *_LAYERS, *_SAMPLING, *_RANKS_AND_FUSED)
}
"""Every operation's spec, by name."""
