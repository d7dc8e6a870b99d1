"""The forward pass of every decoder-only family, written once against the ops table.

It knows no array library: arrays are handles that only ops and ``forward`` touch; every ``if`` asks the spec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cardan.models.parameters import ParameterList, TensorInfo
from cardan.models.spec import Activation, DecoderSpec, QKNorm
from cardan.ops import Ops
from cardan.platform import Forward, ModelFacts, Parameter, RopeTable
from cardan.quantization import tensor_bytes
from cardan.types import Array, LayerKV

Weights = Mapping[str, Any]

NATIVE_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
FORMAT_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class DecoderModel:
    """A decoder with its sizes bound; implements ``cardan.platform.Model``.

    Args:
        spec: what the family file made of the config.
        config: the config itself, for its architecture and dtype.
        name: what the user called the model.
        tensors: format and shape of the checkpoint's tensors; None when there is no checkpoint yet, as for random
            weights, whose shapes ``expected_tensors`` lists.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """

    def __init__(self, spec: DecoderSpec, config: Mapping[str, Any], name: str, tensors: TensorInfo | None) -> None:
        self._spec = spec
        self._list = ParameterList(spec, tensors)
        if tensors is not None:
            self._list.check()
        self._parameters = tuple(self._list.parameters)
        self._names = frozenset(parameter.name for parameter in self._parameters)
        self._layers = tuple(spec.layer_kv(index) for index in range(spec.sizes.layers))
        self._facts = self._make_facts(config, name, tensors)

    @property
    def facts(self) -> ModelFacts:
        """Sizes and formats."""
        return self._facts

    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter that the forward pass reads, in the order of its use."""
        return self._parameters

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor that the model reads, by Hugging Face name."""
        return {name: expected.shape for name, expected in self._list.expected.items()}

    def unused_tensors(self) -> tuple[str, ...]:
        """The checkpoint's tensors that nothing reads, but for buffers known to be harmless."""
        return self._list.unused

    def rope_tables(self, context_length: int) -> tuple[RopeTable, ...]:
        """RoPE tables by ``rope_id``, for positions ``0 .. context_length``."""
        return tuple(rope.table(context_length) for rope in self._spec.ropes)

    def hidden(self, ops: Ops, weights: Weights, forward: Forward) -> Array:
        """Run the layers and the final norm. Returns ``[tokens, hidden]``."""
        stream = self._embed(ops, weights, forward)
        delta = None
        for layer in self._layers:
            at = f"layers.{layer.index}."
            x, stream = self._join(ops, weights, stream, delta, at + "input_norm")
            x = self._attention(ops, weights, forward, layer, x)
            stream, delta = self._leave(ops, weights, stream, x, (at + "o", at + "attention_out_norm"))
            x, stream = self._join(ops, weights, stream, delta, at + "mlp_norm")
            x = self._mlp(ops, weights, at, x)
            stream, delta = self._leave(ops, weights, stream, x, (at + "down", at + "mlp_out_norm"))
        x, _ = self._join(ops, weights, stream, delta, "norm")
        return x

    def logits(self, ops: Ops, weights: Weights, hidden: Array) -> Array:
        """Head over chosen rows of the hidden state. Returns float32 ``[n, vocab]``."""
        logits = ops.all_gather(ops.linear_float32(hidden, weights["head"]))
        if self._spec.logit_scale != 1.0:
            logits = ops.scale(logits, self._spec.logit_scale)
        if self._spec.logit_softcap is not None:
            logits = ops.tanh_softcap(logits, self._spec.logit_softcap)
        return logits

    def _embed(self, ops: Ops, weights: Weights, forward: Forward) -> Array:
        """Embedded tokens, those given as vectors put in their places, before or after the family scales them."""
        stream = ops.all_reduce(ops.embed(forward.input_ids, weights["embed"]))
        given, scale = forward.given_embeds, self._spec.embedding_scale
        if given is not None and self._spec.scales_given_embeds:
            stream = ops.scatter_rows(stream, *given)
        if scale != 1.0:
            stream = ops.scale(stream, scale)
        if given is not None and not self._spec.scales_given_embeds:
            stream = ops.scatter_rows(stream, *given)
        return stream

    def _join(self, ops: Ops, weights: Weights, stream: Array, delta: Array | None, norm: str) -> tuple[Array, Array]:
        """Add what a block gave to the residual stream; returns the next block's input and the stream."""
        eps = self._spec.norm_eps
        if norm not in self._names:
            total = stream if delta is None else ops.add(stream, delta)
            return total, total
        if delta is None:
            return ops.rms_norm(stream, weights[norm], eps), stream
        return ops.add_rms_norm(delta, stream, weights[norm], eps)

    def _leave(
        self, ops: Ops, weights: Weights, stream: Array, x: Array, names: tuple[str, str]
    ) -> tuple[Array, Array | None]:
        """Project what a block computed, by the parameter ``names[0]`` and the norm ``names[1]`` where there is one.

        Returns the residual stream, and what is still to be added to it: nothing where the projection added itself.
        """
        projection, norm = names
        if ops.has_linear_add and norm not in self._names and self._spec.residual_scale == 1.0:
            return ops.linear_add(x, weights[projection], stream), None
        delta = ops.all_reduce(ops.linear(x, weights[projection]))
        if norm in self._names:
            delta = ops.rms_norm(delta, weights[norm], self._spec.norm_eps)
        return stream, delta if self._spec.residual_scale == 1.0 else ops.scale(delta, self._spec.residual_scale)

    def _attention(self, ops: Ops, weights: Weights, forward: Forward, layer: LayerKV, x: Array) -> Array:
        at = f"layers.{layer.index}."
        q, k, v = self._project(ops, weights, at, x)
        if self._spec.qk_norm is QKNorm.WIDTH:
            q, k = self._norm_qk(ops, weights, at, q, k)
        q, k, v = (
            ops.split_heads(part, heads)
            for part, heads in ((q, layer.q_heads), (k, layer.kv_heads), (v, layer.kv_heads))
        )
        if self._spec.qk_norm is QKNorm.HEAD:
            q, k = self._norm_qk(ops, weights, at, q, k)
        return _rope_and_attend(forward, q, k, v, layer)

    def _project(self, ops: Ops, weights: Weights, at: str, x: Array) -> tuple[Array, ...]:
        """Queries, keys and values, by one linear where their formats match."""
        if at + "qkv" not in self._names:
            return tuple(ops.linear(x, weights[at + key]) for key in ("q", "k", "v"))
        sizes = self._spec.sizes
        q_width, kv_width = sizes.q_heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        return ops.split(ops.linear(x, weights[at + "qkv"]), (q_width, kv_width, kv_width))

    def _norm_qk(self, ops: Ops, weights: Weights, at: str, q: Array, k: Array) -> tuple[Array, Array]:
        eps = self._spec.norm_eps
        return ops.rms_norm(q, weights[at + "q_norm"], eps), ops.rms_norm(k, weights[at + "k_norm"], eps)

    def _mlp(self, ops: Ops, weights: Weights, at: str, x: Array) -> Array:
        activation, width = self._spec.activation, self._spec.sizes.intermediate
        if at + "gate_up" not in self._names:
            gate, up = ops.linear(x, weights[at + "gate"]), ops.linear(x, weights[at + "up"])
            gated = ops.silu(gate) if activation is Activation.SILU else ops.gelu(gate, self._approximate)
            return ops.mul(gated, up)
        if activation is Activation.SILU:
            return ops.silu_mul(ops.linear(x, weights[at + "gate_up"]), width)
        return ops.gelu_mul(ops.linear(x, weights[at + "gate_up"]), width, self._approximate)

    @property
    def _approximate(self) -> bool:
        return self._spec.activation is Activation.GELU_TANH

    def _make_facts(self, config: Mapping[str, Any], name: str, tensors: TensorInfo | None) -> ModelFacts:
        spec, sizes = self._spec, self._spec.sizes
        read = {key: (tensors or {}).get(key, ("", tuple(e.shape))) for key, e in self._list.expected.items()}
        formats: dict[str, int] = {}
        for fmt, _ in read.values() if tensors is not None else ():
            formats[fmt] = formats.get(fmt, 0) + 1
        return ModelFacts(
            name=name,
            architecture=str(next(iter(config.get("architectures") or ()), spec.family)),
            family=spec.family,
            num_layers=sizes.layers,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.intermediate,
            vocab_size=sizes.vocab,
            context_length=max(sizes.context_length, *(rope.stretched_length for rope in spec.ropes)),
            layers=self._layers,
            num_parameters=sum(_count(shape) for _, shape in read.values()),
            weight_bytes=sum(tensor_bytes(fmt, shape) for fmt, shape in read.values()) if tensors is not None else 0,
            weight_formats=formats,
            native_dtype=_native_dtype(config, formats),
            takes_embeds=True,
        )


def _rope_and_attend(forward: Forward, q: Array, k: Array, v: Array, layer: LayerKV) -> Array:
    """By one call where the step is a ``RotatingForward``, which a plugin's own need not be."""
    both: Callable[..., Array] | None = getattr(forward, "rope_and_attend", None)
    if both is not None:
        return both(q, k, v, layer)
    return forward.attend(forward.rope(q, layer.rope_id), forward.rope(k, layer.rope_id), v, layer)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _native_dtype(config: Mapping[str, Any], formats: Mapping[str, int]) -> str:
    """What the config says, else the type of dense weights, else bfloat16 (quantized weights name no type)."""
    said = config.get("dtype") or config.get("torch_dtype")
    if said in NATIVE_DTYPES:
        return NATIVE_DTYPES[said]
    quantized = formats.keys() - FORMAT_DTYPES.keys()
    if quantized or not formats:
        return "bfloat16"
    return FORMAT_DTYPES[max(formats, key=lambda fmt: formats[fmt])]
