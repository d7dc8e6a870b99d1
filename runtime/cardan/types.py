"""Plain data that crosses the seams of the engine: batches, results, sampling, KV layout, weights.

It knows no array library, no device and no process; everything here is ints, strings and numpy.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from cardan.grammar_spec import GrammarSpec

Int32Array: TypeAlias = npt.NDArray[np.int32]
UInt64Array: TypeAlias = npt.NDArray[np.uint64]
Float32Array: TypeAlias = npt.NDArray[np.float32]
Float64Array: TypeAlias = npt.NDArray[np.float64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

Array: TypeAlias = Any
"""An opaque handle of a platform's array. Neutral code passes it on and never looks inside."""


# --- sampling -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request wants its tokens chosen, where it wants to stop, and what its output must match (``grammar``).

    A grammar ends an output that is complete, also before ``min_new_tokens`` and with ``ignore_eos``.

    Field names are those users of the field know. ``top_k = -1`` means the whole vocabulary;
    ``temperature = 0`` means greedy. Penalties follow the field: ``repetition_penalty`` looks at
    prompt and output, ``frequency_penalty`` and ``presence_penalty`` at the output only.
    ``shown_special_ids`` are special tokens that stay in the text in spite of ``skip_special_tokens``.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    shown_special_ids: tuple[int, ...] = ()
    n: int = 1
    grammar: GrammarSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobParams:
    """Which logprobs one request wants.

    Attributes:
        output: logprob of each output token.
        prompt_start: position of the first prompt token whose logprob is wanted, or None for none.
        top: how many most likely alternatives at each position, 0 for none.
        token_ids: ids whose logprob is wanted at each position as well.
    """

    output: bool = False
    prompt_start: int | None = None
    top: int = 0
    token_ids: tuple[int, ...] = ()


class FinishKind(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why a request ended, with the stop that matched or the message of the error.

    Attributes:
        kind: what ended it.
        matched: the token id, string or regex that matched, for ``STOP``.
        message: what went wrong, for ``ABORT`` and ``ERROR``.
        length: number of output tokens, for ``LENGTH``.
        refused: for ``ERROR`` before the first step, whoever's fault: its sender gets the error itself, and not this.
        code: for ``ERROR`` that the request brought about and gets, a short word for it; else None.
    """

    kind: FinishKind
    matched: int | str | None = None
    message: str | None = None
    length: int | None = None
    refused: bool = False
    code: str | None = None


# --- KV layout ----------------------------------------------------------------------------------


class KVKind(enum.StrEnum):
    """What a layer keeps between steps."""

    FULL = "full"
    SLIDING = "sliding"
    LATENT = "latent"
    STATE = "state"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """What an attention backend must know of one layer.

    Attributes:
        index: which layer, from 0.
        group: KV group; layers of a group share slots and lifetime.
        kind: what the layer keeps.
        q_heads: query heads on this rank.
        kv_heads: key and value heads on this rank.
        k_dim: width of a key head.
        v_dim: width of a value head.
        scale: factor on ``q @ k``.
        window: a query at position ``p`` sees keys at positions ``> p - window``; None sees all.
        softcap: ``cap * tanh(score / cap)`` on scaled scores; None for none.
        sinks: whether the layer passes learned attention sinks.
        rope_id: which of the model's RoPE tables the layer uses.
        k_scale: what keys are divided by before they become floats of 8 bits; no other type of KV uses it.
        v_scale: likewise for values.
    """

    index: int
    group: int = 0
    kind: KVKind = KVKind.FULL
    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    rope_id: int = 0
    k_scale: float = 1.0
    v_scale: float = 1.0


DTYPE_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
DTYPE_BYTES |= dict.fromkeys(("int8", "fp8_e4m3", "fp8_e5m2"), 1)
"""Bytes of one element of the dtypes that activations and KV caches can have."""

KV_SCALE_BYTES = {"int8": DTYPE_BYTES["float32"]}
"""Bytes of the scale beside each slot and head, of keys and of values, where KV elements are codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """How the KV pool of a model is laid out.

    Attributes:
        layers: one entry per layer, in order.
        page_size: tokens per page; slots ``[p * page_size, (p + 1) * page_size)`` are page ``p``.
        dtype: element type of keys and values, a key of ``DTYPE_BYTES``.
    """

    layers: tuple[LayerKV, ...]
    page_size: int
    dtype: str

    @property
    def num_groups(self) -> int:
        """Number of KV groups, at least 1."""
        return max((layer.group for layer in self.layers), default=0) + 1

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one token's KV takes in all layers together, scales included."""
        elements = sum(layer.kv_heads * (layer.k_dim + layer.v_dim) for layer in self.layers)
        heads = 2 * sum(layer.kv_heads for layer in self.layers)
        return elements * DTYPE_BYTES[self.dtype] + heads * KV_SCALE_BYTES.get(self.dtype, 0)


# --- what crosses to the device each step -------------------------------------------------------


class ForwardMode(enum.StrEnum):
    """What the rows of a batch do."""

    EXTEND = "extend"
    DECODE = "decode"
    MIXED = "mixed"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDelta:
    """New entries for one row of the device's row-to-slot table.

    Attributes:
        row_id: which row.
        start: first column (position in the sequence) that changes.
        slots: int32 ``[groups, n]``, written to columns ``start .. start + n``.
    """

    row_id: int
    start: int
    slots: Int32Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableDeltas(Sequence[TableDelta]):
    """The table changes of one step as flat arrays, so that a step of many rows costs no object per row.

    A device applies them at once: ``table[:, rows, positions] = slots``. Read as a sequence it gives one ``TableDelta``
    for each run of consecutive positions of a row.

    Attributes:
        rows: int32 ``[m]``, which row each entry belongs to.
        positions: int32 ``[m]``, which column.
        slots: int32 ``[groups, m]``.
    """

    rows: Int32Array
    positions: Int32Array
    slots: Int32Array

    @classmethod
    def of(cls, deltas: Sequence[TableDelta]) -> TableDeltas:
        """The flat form of ``deltas``, which is what a batch of the scheduler has already."""
        if isinstance(deltas, cls):
            return deltas
        if not deltas:
            nothing = np.zeros(0, np.int32)
            return cls(rows=nothing, positions=nothing, slots=nothing[None])
        counts = [delta.slots.shape[1] for delta in deltas]
        positions = [np.arange(delta.start, delta.start + n) for delta, n in zip(deltas, counts, strict=True)]
        return cls(
            rows=np.repeat(np.array([delta.row_id for delta in deltas], np.int32), counts),
            positions=np.concatenate(positions).astype(np.int32),
            slots=np.concatenate([delta.slots for delta in deltas], axis=1),
        )

    def _run_bounds(self) -> list[int]:
        breaks = (np.diff(self.rows) != 0) | (np.diff(self.positions) != 1)
        return [0, *(np.flatnonzero(breaks) + 1).tolist(), int(self.rows.shape[0])]

    def __len__(self) -> int:
        return len(self._run_bounds()) - 1 if self.rows.shape[0] else 0

    def __iter__(self) -> Iterator[TableDelta]:
        if self.rows.shape[0] == 0:
            return
        for start, stop in itertools.pairwise(self._run_bounds()):
            yield TableDelta(
                row_id=int(self.rows[start]), start=int(self.positions[start]), slots=self.slots[:, start:stop]
            )

    @overload
    def __getitem__(self, index: int) -> TableDelta: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TableDelta]: ...
    def __getitem__(self, index: int | slice) -> TableDelta | Sequence[TableDelta]:
        return tuple(self)[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltySeed:
    """Token counts that a row starts from, sent when a row that asks for penalties is (re)admitted.

    Attributes:
        row_id: which row.
        prompt_ids: int32, distinct ids that occur in the prompt.
        output_ids: int32, distinct ids that occur in the output so far.
        output_counts: int32, how often each of ``output_ids`` occurs.
    """

    row_id: int
    prompt_ids: Int32Array
    output_ids: Int32Array
    output_counts: Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """Sampling state of the rows that get a token this step; all arrays have length ``n``.

    Row ``i`` samples from the logits of ``Batch.logits_at[i]``.

    Attributes:
        row_ids: int32, the device row (where the sampled token is kept for the next step).
        temperature: float32, 0 means greedy.
        top_k: int32, at least 1; the vocabulary size where not restricted.
        top_p: float32 in (0, 1].
        min_p: float32 in [0, 1].
        seeds: uint64, key of the counter-based noise.
        positions: int32, position in the sequence of the token being sampled (noise counter).
        frequency_penalty: float32.
        presence_penalty: float32.
        repetition_penalty: float32.
        bias_index: int32 ``[m]``, index into the ``n`` sampled rows, of each sparse bias.
        bias_ids: int32 ``[m]``, token ids of the sparse biases.
        bias_values: float32 ``[m]``, added to logits; ``-inf`` forbids (min_new_tokens uses this).
        penalty_seeds: counts for rows that are new on the device.
        want_logprobs: bool, logprob of the sampled token wanted.
        top_logprobs: int32, how many alternatives wanted.
        logprob_token_ids: for each row the further ids whose logprob is wanted.
        has_mask: bool, the row waits for a grammar mask, given to ``Step.sample``.
        given_logits: which of the ``n`` rows sample from logits that the host gives instead of the model's, int32
            ``[g]``, and these, float32 ``[g, vocab]``; penalties, biases and masks act on them. None for none.
    """

    row_ids: Int32Array
    temperature: Float32Array
    top_k: Int32Array
    top_p: Float32Array
    min_p: Float32Array
    seeds: UInt64Array
    positions: Int32Array
    frequency_penalty: Float32Array
    presence_penalty: Float32Array
    repetition_penalty: Float32Array
    bias_index: Int32Array
    bias_ids: Int32Array
    bias_values: Float32Array
    penalty_seeds: tuple[PenaltySeed, ...] = ()
    want_logprobs: BoolArray
    top_logprobs: Int32Array
    logprob_token_ids: tuple[tuple[int, ...], ...] = ()
    has_mask: BoolArray
    given_logits: tuple[Int32Array, Float32Array] | None = None

    @property
    def any_penalty(self) -> bool:
        """Whether any row penalizes repeated tokens."""
        return bool(
            (self.frequency_penalty != 0).any()
            or (self.presence_penalty != 0).any()
            or (self.repetition_penalty != 1).any()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Prompt positions whose next token's logprob is wanted in this batch.

    Attributes:
        token_index: int32 ``[m]``, index into the tokens of the batch.
        targets: int32 ``[m]``, the id that follows each of them.
        top: int32 ``[m]``, how many alternatives.
        token_ids: for each position the further ids whose logprob is wanted.
    """

    token_index: Int32Array
    targets: Int32Array
    top: Int32Array
    token_ids: tuple[tuple[int, ...], ...] = ()


class Pooling(enum.StrEnum):
    """Which of a prompt's final hidden states stand for it: that of the last token, or the mean of all."""

    LAST = "last"
    MEAN = "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledSpans:
    """Stretches ``[start, stop)`` of a batch's tokens whose hidden states, after the final norm, are wanted summed."""

    starts: Int32Array
    stops: Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One forward step. Tokens of all rows are concatenated.

    Attributes:
        mode: what the rows do.
        input_ids: int32 ``[tokens]``; -1 means: this row's last sampled token, known on the device.
        positions: int32 ``[tokens]``, position of each token in its sequence.
        query_starts: int32 ``[rows + 1]``, where each row's tokens begin.
        seq_lens: int32 ``[rows]``, length of each sequence after this step.
        row_ids: int32 ``[rows]``, row of the device's row-to-slot table.
        out_slots: int32 ``[groups, tokens]``, where each token's KV goes.
        table_deltas: changes to the row-to-slot tables, applied before the step; the scheduler gives
            ``TableDeltas``, whose flat arrays are the fast way to apply them.
        logits_at: int32 ``[n]``, indices into the tokens whose logits are sampled from.
        sampling: state of the ``n`` rows that sample, or None when no row does.
        prompt_logprobs: prompt positions whose logprobs are wanted, or None.
        pooled: stretches whose hidden states are wanted summed, or None.
        hidden_at: int32 ``[h]``, tokens whose hidden states are wanted each, or None.
        embeds: tokens that are vectors instead of ids, int32 ``[m]``, and float32 ``[m, hidden]``; none when decoding.
    """

    mode: ForwardMode
    input_ids: Int32Array
    positions: Int32Array
    query_starts: Int32Array
    seq_lens: Int32Array
    row_ids: Int32Array
    out_slots: Int32Array
    table_deltas: Sequence[TableDelta] = ()
    logits_at: Int32Array
    sampling: SamplingBatch | None = None
    prompt_logprobs: PromptLogprobs | None = None
    pooled: PooledSpans | None = None
    hidden_at: Int32Array | None = None
    embeds: tuple[Int32Array, Float32Array] | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows (requests)."""
        return int(self.row_ids.shape[0])

    @property
    def num_tokens(self) -> int:
        """Number of tokens that go through the model."""
        return int(self.input_ids.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Logprobs at one position.

    Attributes:
        logprob: of the token itself.
        top: ``(token id, logprob)``, most likely first.
        chosen: ``(token id, logprob)`` of the ids the request named.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    chosen: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step gave, read on the host.

    Attributes:
        tokens: int32 ``[n]``, sampled tokens, one per row of the batch's ``sampling``.
        failed: bool ``[n]``, the row's logits held NaN or allowed no token at all.
        logprobs: per sampled row, or None where not asked for.
        prompt_logprobs: per requested prompt position, in the order asked for.
        pooled: float64 ``[m, hidden]``, sums of the batch's ``pooled``; None where the device gives no hidden states.
        hidden: float32 ``[h, hidden]``, hidden states after the final norm of the batch's ``hidden_at``, or None.
    """

    tokens: Int32Array
    failed: BoolArray
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: Float64Array | None = None
    hidden: Float32Array | None = None


# --- weights ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorView:
    """One tensor of a checkpoint, still in its file's encoding.

    Attributes:
        name: its Hugging Face name, whatever the file calls it.
        dtype: ``F32``, ``F16``, ``BF16``, ``I32`` … or a quantized block format such as ``Q4_1``.
        shape: logical shape, outermost first; for a linear ``(out_features, in_features)``.
        data: the bytes, usually mapped from the file; rows are contiguous.
        order: int32 ``[columns]``, which logical column each stored one is, where columns with one scale were put side
            by side; None where they are in order. Only neutral code sees it: packed views never have one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    order: Int32Array | None = field(default=None, compare=False)

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        count = 1
        for size in self.shape:
            count *= size
        return count
