"""What a model's operations should have given: float64 results from the checkpoint's own values and a call's inputs.

They know no platform. Weights are widened from the checkpoint, not read from the device, so that what packing or a GEMM
did to them shows; keys and values are kept densely, so that what a pool did to them shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cardan.accuracy.watching import Call
from cardan.errors import CardanError
from cardan.ops import ReferenceOps
from cardan.ops.definitions import NumpyArray
from cardan.ops.rounding import ROUNDOFF
from cardan.platform import Capabilities, Checkpoint, LinearSpec, Model, OpsDevice, Parameter, Plan, Source
from cardan.references.attention import attend
from cardan.types import LayerKV

GROUPS: Mapping[str, tuple[str, ...]] = {
    "embedding": ("embed",),
    "linears": ("linear", "linear_add", "linear_float32"),
    "norms": ("rms_norm", "layer_norm", "add_rms_norm"),
    "rotation": ("rope",),
    "attention": ("attend",),
    "activations": ("silu", "gelu", "silu_mul", "gelu_mul", "mul", "tanh_softcap"),
    "sums": ("add",),
}
"""Operations by what a user would call them."""
GROUP_OF: Mapping[str, str] = {op: group for group, ops in GROUPS.items() for op in ops}

KEPT_UP_TO = 4 * 2**30
"""Bytes of float32 weights that are kept once they were widened; those of larger models are widened at each use."""
ROUNDINGS = 8.0
"""Of the activations' type, that an operation's result may be off by."""
SUM_ROUNDINGS = 256.0
"""Of float32, likewise: sums of some thousand terms, and what exponentials and cosines are approximated by."""
KV_STEPS: Mapping[str, float] = {"fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3, "int8": 2.0**-7}
"""What narrow types of keys and values round by, relative to the largest of a head."""
STEPS = 4.0
"""How many of the steps that inputs are rounded to a result may be off by, relative to its own size: the largest of a
group is a few times its usual size."""
MOST = 1e9
"""Errors are not given larger, so that none is infinite."""


@dataclass(slots=True)
class _History:
    """Keys and values of the sequence that runs."""

    keys: list[NumpyArray] = field(default_factory=list)
    values: list[NumpyArray] = field(default_factory=list)

    @property
    def length(self) -> int:
        return sum(len(part) for part in self.keys)


class References:
    """References of one model over one checkpoint, for runs of one sequence at a time with nothing cached."""

    def __init__(self, model: Model, checkpoint: Checkpoint, context_length: int) -> None:
        """Bind them.

        Args:
            model: whose operations are called.
            checkpoint: where its weights are.
            context_length: positions that rotations are needed for.
        """
        self._checkpoint = checkpoint
        self._parameters = {parameter.name: parameter for parameter in model.parameters()}
        self._ropes = model.rope_tables(context_length)
        self._ops = ReferenceOps()
        self._keeps = sum(4 * math.prod(parameter.shape) for parameter in model.parameters()) <= KEPT_UP_TO
        self._kept: dict[str, NumpyArray] = {}
        self._histories: dict[int, _History] = {}

    def result(self, call: Call) -> NumpyArray:
        """What the call should have given, float64; of ``add_rms_norm`` the norm, see ``stream``."""
        if call.op == "attend":
            return self._attend(call)
        if call.op == "rope":
            x, rope_id, positions = call.arguments
            rope = self._ropes[rope_id]
            cos, sin = (np.asarray(part, np.float64) for part in (rope.cos, rope.sin))
            at = np.asarray(call.ops.to_host(positions), np.int64)
            return self._ops.rope(_host(call, x), at, cos, sin, rope.interleaved)
        if call.op == "embed":
            ids = np.asarray(call.ops.to_host(call.arguments[0]), np.int64)
            rows: NumpyArray = self.weight(call.key)[ids].astype(np.float64)
            return rows
        if call.op in GROUPS["linears"]:
            return self._linear(call)
        if call.op in GROUPS["norms"]:
            return self._norm(call)
        plain: Callable[..., NumpyArray] = getattr(self._ops, call.op)
        return plain(*(_host(call, argument) for argument in call.arguments))

    def stream(self, call: Call) -> NumpyArray:
        """The sum that ``add_rms_norm`` gives beside the norm."""
        total: NumpyArray = _host(call, call.arguments[0]) + _host(call, call.arguments[1])
        return total

    def size(self, call: Call) -> NumpyArray | None:
        """How large the terms of a linear's sums are together, root of the sum of squares; None for other operations.

        Sums round in proportion to their terms, which may cancel.
        """
        if call.op not in GROUPS["linears"]:
            return None
        x, weight = _host(call, call.arguments[0]), self.weight(call.key).astype(np.float64)
        terms: NumpyArray = np.sqrt((x**2) @ (weight**2).T)
        return terms

    def weight(self, name: str) -> NumpyArray:
        """A parameter's values from the checkpoint, float32."""
        parameter = self._parameters[name]
        if parameter.tied_to is not None:
            return self.weight(parameter.tied_to)
        found = self._kept.get(name)
        if found is None:
            found = self._joined(parameter.sources).reshape(parameter.shape) + np.float32(parameter.add)
            if self._keeps:
                self._kept[name] = found
        return found

    def formats(self, name: str) -> set[str]:
        """Formats of the tensors that a parameter is made of."""
        parameter = self._parameters[name]
        if parameter.tied_to is not None:
            return self.formats(parameter.tied_to)
        return {self._checkpoint.tensor(source.tensor).dtype for source in parameter.sources}

    def parameter(self, name: str) -> Parameter | None:
        """A parameter of the model."""
        return self._parameters.get(name)

    def _joined(self, sources: Sequence[Source]) -> NumpyArray:
        parts = []
        for source in sources:
            values = self._checkpoint.dequantize(self._checkpoint.tensor(source.tensor))
            parts.append(values if source.rows is None else values[slice(*source.rows)])
        return np.concatenate(parts)

    def _linear(self, call: Call) -> NumpyArray:
        x = _host(call, call.arguments[0])
        out: NumpyArray = x @ self.weight(call.key).astype(np.float64).T
        bias = self._parameters[call.key].bias
        if bias:
            out = out + self._joined(bias).reshape(-1)
        return out + _host(call, call.arguments[2]) if call.op == "linear_add" else out

    def _norm(self, call: Call) -> NumpyArray:
        weight = self.weight(call.key).astype(np.float64)
        if call.op == "rms_norm":
            return self._ops.rms_norm(_host(call, call.arguments[0]), weight, call.arguments[2])
        if call.op == "add_rms_norm":
            return self._ops.rms_norm(self.stream(call), weight, call.arguments[3])
        x, scale, bias, eps = call.arguments
        shift = None if bias is None else _host(call, bias)
        return self._ops.layer_norm(_host(call, x), _host(call, scale), shift, eps)

    def _attend(self, call: Call) -> NumpyArray:
        q, k, v, layer, sinks, positions = call.arguments
        at = np.asarray(call.ops.to_host(positions), np.int64)
        history = self._histories.setdefault(layer.index, _History())
        if at[0] == 0:
            history = self._histories[layer.index] = _History()
        if at[0] != history.length or (np.diff(at) != 1).any():
            raise CardanError(
                f"Attention by its reference follows one sequence at a time, but position {int(at[0])} came after "
                f"{history.length} tokens. Run it without other requests and without cached prefixes."
            )
        history.keys.append(_host(call, k))
        history.values.append(_host(call, v))
        keys, values = np.concatenate(history.keys), np.concatenate(history.values)
        return attend(_host(call, q), keys, values, layer, None if sinks is None else _host(call, sinks)).out


def _host(call: Call, x: Any) -> Any:
    """An argument on the host, arrays in float64."""
    if x is None or isinstance(x, (int, float, bool, str, LayerKV)):
        return x
    values = np.asarray(call.ops.to_host(x))
    return values.astype(np.float64) if np.issubdtype(values.dtype, np.floating) else values


def error(got: NumpyArray, want: NumpyArray, size: NumpyArray | None = None) -> float:
    """The largest relative error of a feature over the tokens of a call.

    Each token's values count relative to their own root mean square, or to that of the terms they are sums of. A
    feature that is larger than others counts relative to itself, so that one wrong row of a weight shows and rounding
    of an outlier does not.
    """
    count = len(want)
    got, want = (np.asarray(side, np.float64).reshape(count, -1) for side in (got, want))
    scale = np.sqrt((want**2).mean(axis=1, keepdims=True))
    if size is not None:
        scale = np.maximum(scale, size.reshape(count, -1))
    scale = np.maximum(scale, 1e-30)
    off = np.sqrt((((got - want) / scale) ** 2).mean(axis=0))
    own = np.sqrt(((want / scale) ** 2).mean(axis=0))
    relative = off / np.maximum(own, 1.0)
    return MOST if np.isnan(relative).any() else min(float(relative.max()), MOST)


class Allowance:
    """How far a result may be from its reference, relative to its size: what a plan says is rounded, and to what."""

    def __init__(self, references: References, plan: Plan, capabilities: Capabilities, device: OpsDevice) -> None:
        self._references = references
        self._plan = plan
        self._capabilities = capabilities
        self._methods = device.linear_methods()
        self._of_weights: dict[str, float] = {}

    def of(self, call: Call) -> float:
        """For one call."""
        roundoff = ROUNDOFF[self._plan.dtype]
        allowed = ROUNDINGS * roundoff * (self._plan.dtype != "float32") + SUM_ROUNDINGS * ROUNDOFF["float32"]
        if call.op == "attend":
            kv = self._plan.kv_cache_dtype
            allowed += STEPS * KV_STEPS.get(kv, 0.0)
            if kv in ROUNDOFF and kv != self._plan.dtype:
                allowed += ROUNDINGS * ROUNDOFF[kv]
        if call.op in (*GROUPS["linears"], "embed"):
            allowed += self._weight(call.key)
        return allowed

    def _weight(self, name: str) -> float:
        """What a weight's formats add, by the one that adds most."""
        found = self._of_weights.get(name)
        if found is None:
            found = max((self._format(name, fmt) for fmt in self._references.formats(name)), default=0.0)
            self._of_weights[name] = found
        return found

    def _format(self, name: str, fmt: str) -> float:
        """What a format is turned to, and what activations are rounded to over it."""
        quantize = self._plan.value("quantization")
        made = None if quantize is None or quantize in self._plan.model.weight_formats else str(quantize)
        answer = self._capabilities.get(f"weights:{fmt}" if made is None else f"quantize:{made}")
        coarse = answer.requantized
        allowed = 0.0 if coarse is None else STEPS / 2.0**coarse.bits
        parameter = self._references.parameter(name)
        if parameter is None or len(parameter.shape) != 2:
            return allowed
        rows, columns = parameter.shape
        spec = LinearSpec(name=name, out_features=rows, in_features=columns, dtype=self._plan.dtype, quantize=made)
        for method in self._methods:
            if method.claims(fmt, spec) is None:
                codes = method.activation_codes(fmt, spec)
                return allowed + (0.0 if codes is None else STEPS / codes.largest)
        return allowed
