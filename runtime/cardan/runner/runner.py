"""The neutral forward pass: a batch of integers in, hidden states and logits on the device, a step to wait for.

It knows no array library, no model family and no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cardan.platform import (
    AttentionBackend,
    AttentionMeta,
    GraphRunner,
    Model,
    OpsDevice,
    OpsKVPool,
    RotatingAttention,
    Runner,
    Step,
)
from cardan.runner.logprobs import LogprobFetch, Wanted, block_rows
from cardan.runner.pooling import HiddenFetch, PooledFetch
from cardan.runner.recorded_sampling import Kind, RecordedSampling
from cardan.runner.sampler import Sampled, Sampler
from cardan.runner.step import NeutralStep
from cardan.types import Array, Batch, Float32Array, ForwardMode, Int32Array, LayerKV, PromptLogprobs, SamplingBatch


class StepForward:
    """One step as the model sees it: token ids, positions, rotation and attention."""

    def __init__(
        self, runner: NeutralRunner, tokens: tuple[Array, Array], backend: AttentionBackend, plan: Any
    ) -> None:
        """Bind a step.

        Args:
            runner: whose ops and RoPE tables it uses.
            tokens: ids and positions, int32 ``[tokens]`` each.
            backend: attends.
            plan: what the backend planned for the step.
        """
        self._runner = runner
        self._backend = backend
        self._rotating = backend if isinstance(backend, RotatingAttention) else None
        self._ops = runner.device.ops
        self.input_ids, self.positions = tokens
        self._ropes: dict[int, Any] = {}
        self._plan = plan
        self.given_embeds: tuple[Array, Array] | None = None

    def give(self, index: Int32Array, vectors: Float32Array) -> None:
        """Have the tokens ``index: [m]`` come as ``vectors: [m, hidden]`` instead of ids."""
        self.given_embeds = (self._ops.from_host(index), self._ops.from_host(vectors))

    def rope(self, x: Array, rope_id: int) -> Array:
        """See ``Forward.rope``."""
        return self._ops.rope_apply(x, self._rotation(rope_id))

    def attend(self, q: Array, k: Array, v: Array, layer: LayerKV, sinks: Array | None = None) -> Array:
        """See ``Forward.attend``."""
        return self._backend.forward(q, k, v, layer, self._plan, sinks)

    def rope_and_attend(self, q: Array, k: Array, v: Array, layer: LayerKV, sinks: Array | None = None) -> Array:
        """See ``RotatingForward.rope_and_attend``."""
        if self._rotating is not None:
            return self._rotating.forward_rotating((q, k, v), self._rotation(layer.rope_id), layer, self._plan, sinks)
        return self.attend(self.rope(q, layer.rope_id), self.rope(k, layer.rope_id), v, layer, sinks)

    def _rotation(self, rope_id: int) -> Any:
        """A table's rows of the step, which are gathered once."""
        prepared = self._ropes.get(rope_id)
        if prepared is None:
            cos, sin, interleaved = self._runner.ropes[rope_id]
            prepared = self._ops.rope_prepare(self.positions, cos, sin, interleaved)
            self._ropes[rope_id] = prepared
        return prepared


class NeutralRunner(Runner):
    """Runs one model over one pool of an ops device, eagerly but for decode steps that a graph runner replays.

    Attributes:
        device: whose ops it uses.
        sampler: with the counts of penalized rows.
        ropes: per table: cosines, sines and whether pairs are interleaved.
    """

    def __init__(
        self,
        device: OpsDevice,
        model: Model,
        weights: dict[str, Any],
        ropes: Sequence[tuple[Array, Array, bool]],
        kv: tuple[OpsKVPool, int],
        backends: tuple[AttentionBackend, AttentionBackend],
    ) -> None:
        """Bind a runner.

        Args:
            device: an open device.
            model: whose weights are loaded.
            weights: packed weights and vectors by name.
            ropes: RoPE tables on the device.
            kv: the pool, and how many rows its tables have.
            backends: attention of steps with several tokens a row, and of decode steps.
        """
        self.device = device
        self.ropes = tuple(ropes)
        self.sampler = Sampler(device.ops, model.facts.vocab_size)
        self._model = model
        self._weights = weights
        self._pool, num_rows = kv
        self._prefill, self._decode = backends
        self._last_tokens = device.ops.from_host(np.zeros(num_rows, dtype=np.int32))
        self._graph: GraphRunner | None = None
        self._recorded: RecordedSampling | None = None
        self._waiting: NeutralStep | None = None

    @property
    def rotates_in_attention(self) -> bool:
        """Whether a kernel of attention rotates queries and keys itself."""
        return any(isinstance(backend, RotatingAttention) for backend in (self._prefill, self._decode))

    def capture_decode(self) -> None:
        """Replay decode steps from captured ones, where the device can."""
        self._graph = self.device.graph_runner(self._pool, self._decode, self._captured_step)
        recorder = self.device.recorder()
        if self._graph is not None and recorder is not None:
            self._recorded = RecordedSampling(self.device, recorder, self.head, self._model.facts.vocab_size)

    def sample_without_waiting(self) -> None:
        """Have steps sample without reading from the device, since the next is launched before they are computed."""
        self.sampler = Sampler(self.device.ops, self._model.facts.vocab_size, may_wait=False)

    def warm_up(self, buckets: Sequence[int]) -> None:
        """Run decode steps of the buckets' sizes over the padding row and slot.

        Where a bucket is captured by its first step, the smallest and the largest are enough.
        """
        if self._graph is not None and not self._graph.captures_ahead:
            buckets = sorted({min(buckets), max(buckets)})
        groups = max((layer.group for layer in self._model.facts.layers), default=0) + 1
        for rows in buckets:
            step = self.launch(padding_batch(groups, np.ones(rows, dtype=np.int32)))
            step.sample()
            step.result()

    def launch(self, batch: Batch) -> Step:
        """See ``Runner.launch``; where head and sampling are recorded they wait for ``Step.sample``."""
        device = self.device
        with device.scope():
            if self._waiting is not None:
                self._waiting.hold()
            self._pool.update_tables(batch.table_deltas)
            hidden, replayed = self._hidden(batch)
            prompt = [] if batch.prompt_logprobs is None else self._prompt_logprobs(hidden, batch.prompt_logprobs)
            pooled = None if batch.pooled is None else PooledFetch(self.device.ops, device.fetch, hidden, batch.pooled)
            states = None
            if batch.hidden_at is not None:
                states = HiddenFetch(self.device.ops, device.fetch, hidden, batch.hidden_at)
            rows = self._rows(hidden, batch.logits_at, batch.num_tokens) if len(batch.logits_at) else None
            kind = None
            if replayed and rows is hidden and self._recorded is not None:
                kind = self._recorded.kind(batch.sampling)
            logits = self.head(rows) if rows is not None and kind is None else None
            device.submit(() if rows is None else (rows if logits is None else logits,))
        step = NeutralStep(self, (rows, logits, kind), batch.sampling, (prompt, pooled, states), replayed=replayed)
        self._waiting = None if kind is None else step
        return step

    def head(self, hidden: Array) -> Array:
        """Logits float32 ``[n, vocab]`` of hidden states."""
        return self._model.logits(self.device.ops, self._weights, hidden)

    def sample_recorded(self, kind: Kind, hidden: Array, sampling: SamplingBatch) -> tuple[Array, Sampled | None]:
        """Logits, and tokens where the recording settles them; the rows' tokens are kept for the next step's -1."""
        assert self._recorded is not None, "only steps of a runner that records have a kind"
        outcome = self._recorded.sample(kind, hidden, sampling, self._last_tokens)
        return outcome.logits, outcome.sampled

    def remember(self, row_ids: Int32Array, tokens: Array) -> None:
        """Keep the rows' sampled tokens for the next step's -1."""
        ops = self.device.ops
        self._last_tokens = ops.scatter_rows(self._last_tokens, ops.from_host(row_ids), tokens)
        self.device.submit((self._last_tokens,))

    def close(self) -> None:
        """Let go of weights, pool and counts."""
        self._weights = {}
        self._last_tokens = None
        self._graph = None
        self._recorded = None
        self._waiting = None

    def _hidden(self, batch: Batch) -> tuple[Array, bool]:
        """Hidden states of all tokens, ``[tokens, hidden]``, and whether they were replayed or run eagerly."""
        ids = self._input_ids(batch)
        meta = AttentionMeta(
            mode=batch.mode,
            query_starts=batch.query_starts,
            seq_lens=batch.seq_lens,
            row_ids=batch.row_ids,
            positions=batch.positions,
            out_slots=batch.out_slots,
        )
        decode = batch.mode is ForwardMode.DECODE
        if decode and self._graph is not None and self._graph.can_replay(meta):
            return self._graph.replay(ids, meta), True
        backend = self._decode if decode else self._prefill
        forward = StepForward(self, (ids, self.device.ops.from_host(batch.positions)), backend, backend.plan(meta))
        if batch.embeds is not None:
            forward.give(*batch.embeds)
        return self._model.hidden(self.device.ops, self._weights, forward), False

    def _captured_step(self, ids: Array, positions: Array, plan: Any) -> Array:
        """A decode step over arrays only: what a graph runner records."""
        return self._model.hidden(
            self.device.ops, self._weights, StepForward(self, (ids, positions), self._decode, plan)
        )

    def _input_ids(self, batch: Batch) -> Array:
        """Token ids on the device, each -1 replaced by its row's last sampled token."""
        ops = self.device.ops
        if batch.num_tokens == 0 or batch.input_ids.min() >= 0:
            return ops.from_host(batch.input_ids)
        unknown = np.flatnonzero(batch.input_ids < 0).astype(np.int32)
        rows = batch.row_ids[np.searchsorted(batch.query_starts, unknown, side="right") - 1]
        known_now = ops.gather_rows(self._last_tokens, ops.from_host(rows))
        if len(unknown) == batch.num_tokens:
            return known_now
        return ops.scatter_rows(ops.from_host(batch.input_ids), ops.from_host(unknown), known_now)

    def _rows(self, hidden: Array, index: Int32Array, num_tokens: int) -> Array:
        if len(index) == num_tokens and (num_tokens == 1 or (index[1:] > index[:-1]).all()):
            return hidden
        return self.device.ops.gather_rows(hidden, self.device.ops.from_host(index))

    def _prompt_logprobs(self, hidden: Array, wanted: PromptLogprobs) -> list[LogprobFetch]:
        """Logprobs of prompt positions, in blocks that bound the logits held at once."""
        ops = self.device.ops
        size = block_rows(self._model.facts.vocab_size)
        all_rows = Wanted(wanted.top, wanted.token_ids)
        blocks = []
        for start in range(0, len(wanted.token_index), size):
            stop = min(start + size, len(wanted.token_index))
            rows = ops.gather_rows(hidden, ops.from_host(wanted.token_index[start:stop]))
            logits = self.head(rows)
            targets = ops.from_host(wanted.targets[start:stop][:, None])
            blocks.append(LogprobFetch(ops, self.device.fetch, logits, targets, all_rows.part(start, stop)))
        return blocks


def padding_batch(num_groups: int, tokens_per_row: Int32Array) -> Batch:
    """A batch that reads and writes slot 0 of row 0 only, for warm-up and dry runs; it samples nothing."""
    starts = np.concatenate(([0], np.cumsum(tokens_per_row))).astype(np.int32)
    tokens = int(starts[-1])
    positions = np.concatenate([np.arange(count) for count in tokens_per_row]).astype(np.int32)
    decode = bool((tokens_per_row == 1).all())
    return Batch(
        mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
        input_ids=np.zeros(tokens, dtype=np.int32),
        positions=positions,
        query_starts=starts,
        seq_lens=tokens_per_row.astype(np.int32),
        row_ids=np.zeros(len(tokens_per_row), dtype=np.int32),
        out_slots=np.zeros((num_groups, tokens), dtype=np.int32),
        logits_at=(starts[1:] - 1).astype(np.int32),
    )
