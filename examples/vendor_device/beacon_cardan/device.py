"""The open Beacon B1: it loads Llama models, keeps their KV by slot, and gives the likeliest token of each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from beacon_cardan.tuning import HEAD_ROWS, multiply
from cardan import platform as seam
from cardan.errors import UnsupportedModelError
from cardan.types import Batch, KVLayout, SamplingBatch, StepResult, TableDelta, TableDeltas

Array = np.ndarray[Any, Any]


class BeaconModel(seam.LoadedModel):
    """A Llama model as the B1's compiler leaves it: float32 matrices by parameter."""

    def __init__(self, model: seam.Model, checkpoint: seam.Checkpoint, context_length: int) -> None:
        self.facts, self.eps = model.facts, float(checkpoint.config.get("rms_norm_eps", 1e-6))
        ropes = model.rope_tables(context_length)
        biased = any(parameter.bias for parameter in model.parameters())
        turned = len(ropes) == 1 and ropes[0].rotary_dim == model.facts.layers[0].k_dim and not ropes[0].interleaved
        plain = turned and not biased and checkpoint.config.get("hidden_act", "silu") == "silu"
        if model.facts.family != "llama" or not plain:
            raise UnsupportedModelError(
                f"The Beacon B1 runs plain Llama models only (no biases, SiLU, whole heads rotated), got "
                f"{model.facts.architecture} {model.facts.name!r}. Choose another model or platform."
            )
        self.rope = ropes[0]
        self.weights: dict[str, Array] = {}
        for parameter in model.parameters():
            parts = [self._rows(checkpoint, source) for source in parameter.sources]
            tied = self.weights.get(parameter.tied_to or "")
            self.weights[parameter.name] = np.concatenate(parts) if parts else np.asarray(tied)

    @staticmethod
    def _rows(checkpoint: seam.Checkpoint, source: seam.Source) -> Array:
        values = checkpoint.dequantize(checkpoint.tensor(source.tensor))
        return values if source.rows is None else values[slice(*source.rows)]

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for array in self.weights.values())

    @property
    def notes(self) -> tuple[str, ...]:
        return ("The Beacon B1 widens all weights to float32.",)


class BeaconPool(seam.KVPool):
    """Keys and values ``[layers, slots, heads, dim]``, and the row-to-slot table ``[rows, length]``."""

    def __init__(self, layout: KVLayout, num_slots: int, num_rows: int, max_length: int) -> None:
        kv = layout.layers[0]
        self.keys, self.values = np.zeros((2, len(layout.layers), num_slots, kv.kv_heads, kv.k_dim), np.float32)
        self.table = np.zeros((num_rows, max_length), np.int32)
        self.last = np.zeros(num_rows, np.int32)

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def update(self, deltas: Sequence[TableDelta]) -> None:
        """Change the table."""
        flat = TableDeltas.of(deltas)
        self.table[flat.rows, flat.positions] = flat.slots[0]


class BeaconStep(seam.Step):
    """A step whose logits are there; its tokens are the likeliest ones, since other requests were refused."""

    def __init__(self, pool: BeaconPool, logits: Array, sampling: SamplingBatch | None) -> None:
        self._pool, self._logits, self._sampling = pool, logits, sampling

    def sample(self, sampling: SamplingBatch | None = None, mask: Array | None = None) -> None:
        """Which rows get a token is the batch's own word, or that of ``sampling``, which replaces it."""
        chosen = self._sampling if sampling is None else sampling
        self._tokens = self._logits.argmax(axis=-1).astype(np.int32)[: 0 if chosen is None else None]
        self._failed = np.isnan(self._logits).any(axis=-1)[: len(self._tokens)]
        if chosen is not None:
            self._pool.last[chosen.row_ids] = self._tokens

    def result(self) -> StepResult:
        return StepResult(tokens=self._tokens, failed=self._failed)


class BeaconRunner(seam.Runner):
    """The compiled program, over one pool."""

    def __init__(self, model: BeaconModel, pool: BeaconPool, head_rows: int) -> None:
        self._model, self._pool, self._head_rows = model, pool, head_rows

    def warm_up(self, buckets: Sequence[int]) -> None:
        """The program was compiled when the model was loaded."""

    def launch(self, batch: Batch) -> BeaconStep:
        self._pool.update(batch.table_deltas)
        rows = np.repeat(batch.row_ids, np.diff(batch.query_starts))
        ids = np.where(batch.input_ids < 0, self._pool.last[rows], batch.input_ids)
        hidden = self._hidden(ids, batch, rows)[batch.logits_at]
        logits = multiply(hidden, self._model.weights["head"], self._head_rows)
        return BeaconStep(self._pool, logits, batch.sampling)

    def close(self) -> None:
        """Nothing is held."""

    def _hidden(self, ids: Array, batch: Batch, rows: Array) -> Array:
        w = self._model.weights
        x = w["embed"][ids]
        for layer in self._model.facts.layers:
            at = f"layers.{layer.index}."
            qkv = self._norm(x, at + "input_norm") @ w[at + "qkv"].T
            q, k, v = np.split(qkv.reshape(len(x), -1, layer.k_dim), np.cumsum((layer.q_heads, layer.kv_heads)), axis=1)
            self._pool.keys[layer.index, batch.out_slots[0]] = self._turn(k, batch.positions)
            self._pool.values[layer.index, batch.out_slots[0]] = v
            x = x + self._attend(self._turn(q, batch.positions), layer, rows, batch.positions) @ w[at + "o"].T
            gate, up = np.split(self._norm(x, at + "mlp_norm") @ w[at + "gate_up"].T, 2, axis=-1)
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[at + "down"].T
        return self._norm(x, "norm")

    def _norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self._model.eps) * self._model.weights[name]

    def _turn(self, x: Array, positions: Array) -> Array:
        cos, sin = self._model.rope.cos[positions][:, None], self._model.rope.sin[positions][:, None]
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)

    def _attend(self, q: Array, layer: Any, rows: Array, positions: Array) -> Array:
        """Token by token over the slots that its row's table names."""
        out = np.empty((len(q), layer.q_heads, layer.v_dim), np.float32)
        for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
            slots = self._pool.table[row, : position + 1]
            keys, values = self._pool.keys[layer.index, slots], self._pool.values[layer.index, slots]
            scores = np.einsum("hgd,nhd->hgn", q[i].reshape(layer.kv_heads, -1, layer.k_dim), keys) * layer.scale
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[i] = np.einsum("hgn,nhd->hgd", weights, values).reshape(layer.q_heads, -1)
        return out.reshape(len(q), -1)


class BeaconDevice(seam.Device):
    """One Beacon B1."""

    info = seam.DeviceInfo(index=0, name="Beacon B1")

    def __init__(self, info: seam.DeviceInfo, head_rows: int = HEAD_ROWS.default) -> None:
        self.info, self.head_rows = info, head_rows

    def memory(self) -> seam.Memory:
        return seam.host_memory()

    def load(
        self, model: seam.Model, checkpoint: seam.Checkpoint, plan: seam.Plan, progress: Any = None
    ) -> seam.LoadedModel:
        return BeaconModel(model, checkpoint, plan.context_length)

    def activation_bytes(self, loaded: seam.LoadedModel, plan: seam.Plan) -> int:
        """Peak of the largest step, four bytes an element.

        For each token six arrays as wide as the MLP and its input and two as wide as all heads; for each row its
        logits, twice; and one token's attention over the whole context.
        """
        facts, rows, length = plan.model, plan.max_running_requests, plan.context_length
        chunk = plan.chunked_prefill_size
        prefill = int(plan.value("max_prefill_tokens")) if chunk < 0 else chunk
        tokens = max(min(prefill, length * rows), rows)
        heads = max((kv.q_heads + 2 * kv.kv_heads) * kv.k_dim for kv in facts.layers)
        attended = max(2 * kv.kv_heads * kv.k_dim + 4 * kv.q_heads for kv in facts.layers)
        a_token = 6 * facts.intermediate_size + 4 * facts.hidden_size + 2 * heads
        return 4 * (tokens * a_token + 2 * rows * facts.vocab_size + length * attended)

    def plan_memory(self, request: seam.MemoryRequest) -> seam.MemoryPlan:
        return seam.SharedMemoryPolicy().plan(request)

    def allocate_kv(self, layout: KVLayout, num_slots: int, num_rows: int, max_length: int) -> seam.KVPool:
        return BeaconPool(layout, num_slots, num_rows, max_length)

    def runner(self, loaded: seam.LoadedModel, pool: seam.KVPool, plan: seam.Plan) -> seam.Runner:
        assert isinstance(loaded, BeaconModel)
        assert isinstance(pool, BeaconPool)
        return BeaconRunner(loaded, pool, self.head_rows)

    def close(self) -> None:
        """Nothing is held."""
