"""What a model looks like from the seam: its facts, its parameters, and its forward pass over ops.

It knows no model family (those stand in ``cardan.models``) and no array library.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cardan.types import Array, Float32Array, LayerKV, TensorView


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the plan and the memory policy need to know of a model.

    Attributes:
        name: what the user called it.
        architecture: as in its config, such as ``LlamaForCausalLM``.
        family: the implementation that runs it, such as ``llama``.
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        intermediate_size: width of the widest feed-forward activation.
        vocab_size: rows of the embedding.
        context_length: longest sequence that the model was made for.
        layers: KV facts of each layer.
        num_parameters: elements of all tensors.
        weight_bytes: bytes of all tensors as they stand in the checkpoint.
        weight_formats: tensors of each format, ``{"Q4_1": 210, "F32": 61}``.
        native_dtype: activation type that the checkpoint suggests.
        takes_embeds: whether its forward pass puts tokens that are given as vectors into their places.
    """

    name: str
    architecture: str
    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    layers: tuple[LayerKV, ...]
    num_parameters: int
    weight_bytes: int
    weight_formats: Mapping[str, int]
    native_dtype: str
    takes_embeds: bool = False


class ParameterKind(enum.StrEnum):
    """What a parameter is used for."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    VECTOR = "vector"


class Shard(enum.StrEnum):
    """How a parameter is split over tensor-parallel ranks."""

    COLUMN = "column"
    ROW = "row"
    VOCAB = "vocab"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Source:
    """Where the rows of a parameter come from in the checkpoint.

    Attributes:
        tensor: Hugging Face name of the tensor.
        rows: half-open range of its rows, or None for all.
    """

    tensor: str
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a model, and the checkpoint tensors whose rows it is made of.

    Attributes:
        name: the key under which the model finds it in its weights.
        kind: ``LINEAR`` is packed by a ``LinearMethod``; ``VECTOR`` stays a plain array.
        shape: ``(out_features, in_features)``, or ``(size,)`` for a vector.
        sources: rows concatenated in order, so that quantized blocks stay whole.
        bias: sources of the bias, concatenated in order; empty for none.
        tied_to: name of an embedding whose storage this linear shares, when it has no tensor of its own.
        shard: how it is split over ranks.
        add: number that the loader adds to each element of a ``VECTOR`` (Gemma stores its norms less 1).
    """

    name: str
    kind: ParameterKind
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    bias: tuple[Source, ...] = ()
    tied_to: str | None = None
    shard: Shard = Shard.NONE
    add: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTable:
    """Cosines and sines of one rotary embedding, already scaled.

    Attributes:
        cos: float32 ``[context, rotary_dim / 2]``.
        sin: float32 ``[context, rotary_dim / 2]``.
        interleaved: pairs are ``(2i, 2i + 1)``; otherwise ``(i, i + rotary_dim / 2)``.
    """

    cos: Float32Array
    sin: Float32Array
    interleaved: bool = False

    @property
    def rotary_dim(self) -> int:
        """How many leading features of a head are rotated."""
        return 2 * int(self.cos.shape[1])


class Forward(Protocol):
    """One step, as a model sees it while it runs."""

    @property
    def input_ids(self) -> Array:
        """Token ids, int32 ``[tokens]``."""

    @property
    def positions(self) -> Array:
        """Positions in the sequences, int32 ``[tokens]``."""

    @property
    def given_embeds(self) -> tuple[Array, Array] | None:
        """Which tokens are given as vectors, int32 ``[m]``, and the vectors, float32 ``[m, hidden]``; None for none."""

    def rope(self, x: Array, rope_id: int) -> Array:
        """Rotate ``x: [tokens, heads, head_dim]`` by this step's positions with table ``rope_id``."""

    def attend(self, q: Array, k: Array, v: Array, layer: LayerKV, sinks: Array | None = None) -> Array:
        """Write ``k, v: [tokens, kv_heads, dim]`` and attend with ``q: [tokens, q_heads, k_dim]``.

        Returns ``[tokens, q_heads * v_dim]``.
        """


class RotatingForward(Protocol):
    """What a ``Forward`` may add: where it does not, a model calls ``rope`` and ``attend``."""

    def rope_and_attend(self, q: Array, k: Array, v: Array, layer: LayerKV, sinks: Array | None = None) -> Array:
        """``attend`` with ``q`` and ``k`` that ``rope`` has not rotated yet, by one kernel where there is one."""


class Model(Protocol):
    """One model with its sizes bound, written against ops; it holds no arrays."""

    @property
    def facts(self) -> ModelFacts:
        """Sizes and formats."""

    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter that the forward pass reads, in the order of its use."""

    def rope_tables(self, context_length: int) -> tuple[RopeTable, ...]:
        """RoPE tables by ``rope_id``, for positions ``0 .. context_length``."""

    def hidden(self, ops: Any, weights: Mapping[str, Any], forward: Forward) -> Array:
        """Run the layers and the final norm. Returns ``[tokens, hidden]``."""

    def logits(self, ops: Any, weights: Mapping[str, Any], hidden: Array) -> Array:
        """Head over chosen rows of the hidden state. Returns float32 ``[n, vocab]``."""


class Checkpoint(Protocol):
    """An opened checkpoint: names, shapes, formats and bytes, under Hugging Face names."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's config with the keys of a Hugging Face ``config.json``."""

    def names(self) -> Iterable[str]:
        """Names of all tensors."""

    def tensor(self, name: str) -> TensorView:
        """One tensor, mapped where the file has it as it is, else put together from its parts.

        Raises:
            CheckpointError: there is no such tensor, or its parts contradict each other.
        """

    def num_bytes(self, name: str) -> int:
        """Bytes of a tensor, which is not read for it."""

    def dequantize(self, view: TensorView) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Exact float32 values of a tensor in any format that the checkpoint can hold."""

    def close(self) -> None:
        """Unmap the files."""
