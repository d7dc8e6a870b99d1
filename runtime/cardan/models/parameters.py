"""Which parameters a decoder has, which tensors of the checkpoint they are made of, and whether these fit.

It knows no family: a ``DecoderSpec`` says everything. It reads names, formats and shapes, never data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from cardan.errors import CheckpointError
from cardan.models.spec import DecoderSpec, QKNorm
from cardan.platform import Parameter, ParameterKind, Shard, Source

TensorInfo: TypeAlias = Mapping[str, tuple[str, tuple[int, ...]]]
"""Format and shape of each tensor of a checkpoint, by Hugging Face name."""

HARMLESS = re.compile(r"(\.rotary_emb\.inv_freq|\.attn\.masked_bias|^rope_freqs\.weight)$")
"""Buffers that some checkpoints carry and that every implementation computes for itself."""


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """A tensor that the model reads.

    Attributes:
        shape: what its shape must be.
        axes: where that shape comes from, in terms of the config.
    """

    shape: tuple[int, ...]
    axes: str


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor out of the one or several that a linear is made of.

    Attributes:
        key: the last part of the parameter's name when the piece stands alone.
        tensor: its name within the layer, without ``.weight``.
        rows: its output features.
        axis: what its output features are, in terms of the config.
    """

    key: str
    tensor: str
    rows: int
    axis: str


class ParameterList:
    """The parameters of one decoder over one checkpoint.

    Args:
        spec: the decoder.
        tensors: the checkpoint's tensors; None when there is no checkpoint yet.
    """

    def __init__(self, spec: DecoderSpec, tensors: TensorInfo | None) -> None:
        self._spec = spec
        self._tensors = tensors
        self._prefix = self._choose_prefix()
        self._head = self._choose_head()
        self.expected: dict[str, ExpectedTensor] = {}
        self.parameters: list[Parameter] = []
        self._list_embedding()
        for index in range(spec.sizes.layers):
            self._list_attention(index)
            self._list_mlp(index)
        self._vector("norm", f"{self._prefix}norm", spec.sizes.hidden, "hidden_size", spec.norm_offset)
        self._list_head()

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of the checkpoint's tensors that nothing reads, but for harmless ones."""
        spare = {self._head} if self._tied else set[str]()
        names = (self._tensors or {}).keys() - self.expected.keys() - spare
        return tuple(sorted(name for name in names if not HARMLESS.search(name)))

    def check(self) -> None:
        """Compare the checkpoint's tensors with what the model expects.

        Raises:
            CheckpointError: a tensor is missing or has another shape.
        """
        tensors = self._tensors or {}
        missing = [name for name in self.expected if name not in tensors]
        if missing:
            some = ", ".join(missing[:3]) + (" …" if len(missing) > 3 else "")
            raise CheckpointError(
                f"The checkpoint lacks {len(missing)} of the {len(self.expected)} tensors that a {self._spec.family} "
                f"model of this config has: {some}. Check that all files of the checkpoint are there and that "
                f"config.json belongs to them."
            )
        for name, wanted in self.expected.items():
            got = tuple(tensors[name][1])
            if got != wanted.shape:
                raise CheckpointError(
                    f"Tensor {name} has shape {list(got)}, expected {list(wanted.shape)} ({wanted.axes} of the "
                    f"config). Check that config.json belongs to these weights."
                )

    def _choose_prefix(self) -> str:
        for prefix in self._spec.prefixes:
            if f"{prefix}embed_tokens.weight" in (self._tensors or ()):
                return prefix
        return self._spec.prefixes[0]

    def _choose_head(self) -> str:
        for name in self._spec.head_names:
            if name in (self._tensors or ()):
                return name
        return self._spec.head_names[0]

    @property
    def _tied(self) -> bool:
        """Whether the head is the embedding; a config that does not say leaves it to the checkpoint."""
        if self._spec.tied is None:
            return self._tensors is not None and self._head not in self._tensors
        return self._spec.tied

    def _list_embedding(self) -> None:
        sizes, tensor = self._spec.sizes, f"{self._prefix}embed_tokens.weight"
        shape = (sizes.vocab, sizes.hidden)
        self.expected[tensor] = ExpectedTensor(shape, "vocab_size, hidden_size")
        self.parameters.append(
            Parameter(
                name="embed", kind=ParameterKind.EMBEDDING, shape=shape, sources=(Source(tensor),), shard=Shard.VOCAB
            )
        )

    def _list_head(self) -> None:
        sizes = self._spec.sizes
        shape = (sizes.vocab, sizes.hidden)
        if not self._tied:
            self.expected[self._head] = ExpectedTensor(shape, "vocab_size, hidden_size")
        self.parameters.append(
            Parameter(
                name="head",
                kind=ParameterKind.LINEAR,
                shape=shape,
                sources=() if self._tied else (Source(self._head),),
                tied_to="embed" if self._tied else None,
                shard=Shard.VOCAB,
            )
        )

    def _list_attention(self, index: int) -> None:
        spec, sizes, norms = self._spec, self._spec.sizes, self._spec.norms
        q_rows, kv_rows = sizes.q_heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        q_axis, kv_axis = "num_attention_heads * head_dim", "num_key_value_heads * head_dim"
        self._norm(index, "input_norm", norms.before_attention)
        if spec.fused_tensors:
            axis = "(num_attention_heads + 2 * num_key_value_heads) * head_dim"
            pieces: tuple[Piece, ...] = (Piece("qkv", "self_attn.qkv_proj", q_rows + 2 * kv_rows, axis),)
        else:
            pieces = (
                Piece("q", "self_attn.q_proj", q_rows, q_axis),
                Piece("k", "self_attn.k_proj", kv_rows, kv_axis),
                Piece("v", "self_attn.v_proj", kv_rows, kv_axis),
            )
        self._columns(index, "qkv", pieces, spec.qkv_bias)
        if spec.qk_norm is not QKNorm.NONE:
            whole = spec.qk_norm is QKNorm.WIDTH
            for key, rows, axis in (("q_norm", q_rows, q_axis), ("k_norm", kv_rows, kv_axis)):
                size, axes = (rows, axis) if whole else (sizes.head_dim, "head_dim")
                tensor = f"{self._prefix}layers.{index}.self_attn.{key}"
                self._vector(f"layers.{index}.{key}", tensor, size, axes, spec.norm_offset)
        self._row(index, Piece("o", "self_attn.o_proj", q_rows, q_axis), spec.o_bias)
        self._norm(index, "attention_out_norm", norms.after_attention)

    def _list_mlp(self, index: int) -> None:
        spec, width, axis = self._spec, self._spec.sizes.intermediate, "intermediate_size"
        self._norm(index, "mlp_norm", spec.norms.before_mlp)
        if spec.fused_tensors:
            pieces: tuple[Piece, ...] = (Piece("gate_up", "mlp.gate_up_proj", 2 * width, f"2 * {axis}"),)
        else:
            pieces = (Piece("gate", "mlp.gate_proj", width, axis), Piece("up", "mlp.up_proj", width, axis))
        self._columns(index, "gate_up", pieces, spec.mlp_bias)
        self._row(index, Piece("down", "mlp.down_proj", width, axis), spec.mlp_bias)
        self._norm(index, "mlp_out_norm", spec.norms.after_mlp)

    def _norm(self, index: int, key: str, tensor: str | None) -> None:
        if tensor is not None:
            name = f"{self._prefix}layers.{index}.{tensor}"
            self._vector(f"layers.{index}.{key}", name, self._spec.sizes.hidden, "hidden_size", self._spec.norm_offset)

    def _vector(self, key: str, tensor: str, size: int, axis: str, offset: float) -> None:
        self.expected[f"{tensor}.weight"] = ExpectedTensor((size,), axis)
        self.parameters.append(
            Parameter(
                name=key,
                kind=ParameterKind.VECTOR,
                shape=(size,),
                sources=(Source(f"{tensor}.weight"),),
                add=offset,
            )
        )

    def _columns(self, index: int, key: str, pieces: tuple[Piece, ...], has_bias: bool) -> None:
        """Linears over the residual stream: one where all pieces have one format, else one for each piece."""
        base = f"{self._prefix}layers.{index}."
        for piece in pieces:
            shape = (piece.rows, self._spec.sizes.hidden)
            self.expected[f"{base}{piece.tensor}.weight"] = ExpectedTensor(shape, f"{piece.axis}, hidden_size")
            if has_bias:
                self.expected[f"{base}{piece.tensor}.bias"] = ExpectedTensor((piece.rows,), piece.axis)
        formats = {(self._tensors or {}).get(f"{base}{piece.tensor}.weight", ("",))[0] for piece in pieces}
        groups = [(key, pieces)] if len(formats) == 1 else [(piece.key, (piece,)) for piece in pieces]
        for name, group in groups:
            self.parameters.append(
                Parameter(
                    name=f"layers.{index}.{name}",
                    kind=ParameterKind.LINEAR,
                    shape=(sum(piece.rows for piece in group), self._spec.sizes.hidden),
                    sources=tuple(Source(f"{base}{piece.tensor}.weight") for piece in group),
                    bias=tuple(Source(f"{base}{piece.tensor}.bias") for piece in group) if has_bias else (),
                    shard=Shard.COLUMN,
                )
            )

    def _row(self, index: int, piece: Piece, has_bias: bool) -> None:
        """A linear back into the residual stream; ``piece.rows`` are its input features here."""
        base, hidden = f"{self._prefix}layers.{index}.{piece.tensor}", self._spec.sizes.hidden
        shape = (hidden, piece.rows)
        self.expected[f"{base}.weight"] = ExpectedTensor(shape, f"hidden_size, {piece.axis}")
        if has_bias:
            self.expected[f"{base}.bias"] = ExpectedTensor((hidden,), "hidden_size")
        self.parameters.append(
            Parameter(
                name=f"layers.{index}.{piece.key}",
                kind=ParameterKind.LINEAR,
                shape=shape,
                sources=(Source(f"{base}.weight"),),
                bias=(Source(f"{base}.bias"),) if has_bias else (),
                shard=Shard.ROW,
            )
        )
