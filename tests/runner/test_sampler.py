"""The sampler against one written here in float64 from the definition, and each knob alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cardan.ops import ReferenceOps, philox
from cardan.runner import Sampler, candidates
from cardan.types import PenaltySeed, SamplingBatch
from cardan_torch import TorchOps

VOCAB = 997
PLATFORMS = {"torch": TorchOps(), "reference": ReferenceOps("float32")}


def batch(n: int, **changes: Any) -> SamplingBatch:
    """A batch of ``n`` greedy rows with some fields changed; scalars stand for all rows."""
    fields: dict[str, Any] = {
        "row_ids": np.arange(1, n + 1, dtype=np.int32),
        "temperature": 0.0, "top_k": VOCAB, "top_p": 1.0, "min_p": 0.0,
        "seeds": np.arange(n, dtype=np.uint64) + 1000, "positions": np.arange(n, dtype=np.int32) + 5,
        "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
        "bias_index": np.zeros(0, np.int32), "bias_ids": np.zeros(0, np.int32), "bias_values": np.zeros(0, np.float32),
        "want_logprobs": False, "top_logprobs": 0, "has_mask": False,
    }  # fmt: skip
    kinds = {"top_k": np.int32, "top_logprobs": np.int32, "want_logprobs": np.bool_, "has_mask": np.bool_}
    fields |= changes
    for name, value in fields.items():
        if name not in ("penalty_seeds", "logprob_token_ids") and not isinstance(value, np.ndarray):
            fields[name] = np.broadcast_to(np.asarray(value, kinds.get(name, np.float32)), (n,)).copy()
    return SamplingBatch(**fields)


def logits_of(n: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((n, VOCAB)) * spread).astype(np.float32)


def sample(ops: Any, logits: np.ndarray, sampling: SamplingBatch, mask: Any = None, sampler: Any = None) -> Any:
    sampler = sampler or Sampler(ops, VOCAB)
    given = ops.from_host(logits)
    result = sampler.sample(given, sampling, mask)
    assert np.array_equal(ops.to_host(given), logits.astype(ops.to_host(given).dtype), equal_nan=True)
    return ops.to_host(result.tokens), ops.to_host(result.failed)


def reference_token(logits: np.ndarray, s: SamplingBatch, row: int) -> int:
    """Temperature, top-k, top-p, min-p, Gumbel-max: full sorts in float64."""
    scores = logits[row].astype(np.float64)
    if s.temperature[row] == 0:
        return int(scores.argmax())
    scores = scores / np.float64(s.temperature[row])
    order = np.argsort(-scores, kind="stable")[: s.top_k[row]]
    shares = np.exp(scores[order] - scores[order[0]])
    shares /= shares.sum()
    reached = np.cumsum(shares)
    if s.top_p[row] < 1:
        count = int(np.searchsorted(reached, np.float64(s.top_p[row]), side="left")) + 1
        order, shares = order[:count], shares[:count]
    order = order[shares >= s.min_p[row] * shares[0]]
    noise = philox.gumbel(s.seeds[row : row + 1], s.positions[row : row + 1], VOCAB)[0]
    return int(order[np.argmax(scores[order] + noise[order])])


KNOBS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_k_beyond_the_first_width": {"temperature": 2.0, "top_k": 200},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "top_p_of_a_flat_row": {"temperature": 50.0, "top_p": 0.97},
    "tiny_top_p": {"temperature": 1.0, "top_p": 1e-6},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "min_p_of_a_flat_row": {"temperature": 50.0, "min_p": 0.5},
    "all_filters": {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.05},
    "all_filters_wide": {"temperature": 4.0, "top_k": 300, "top_p": 0.95, "min_p": 0.02},
}


@pytest.mark.parametrize("name", PLATFORMS)
@pytest.mark.parametrize("knobs", KNOBS)
def test_takes_the_token_that_the_definition_says(knobs: str, name: str) -> None:
    n = 40
    logits, sampling = logits_of(n), batch(n, **KNOBS[knobs])
    tokens, failed = sample(PLATFORMS[name], logits, sampling)
    assert tokens.tolist() == [reference_token(logits, sampling, row) for row in range(n)]
    assert not failed.any()


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_row_is_sampled_alike_alone_and_among_others(name: str) -> None:
    kinds = list(KNOBS.values())
    n = len(kinds)
    columns = {
        key: np.array([kind.get(key, default) for kind in kinds], kind_of)
        for key, default, kind_of in (
            ("temperature", 0, np.float32), ("top_k", VOCAB, np.int32),
            ("top_p", 1, np.float32), ("min_p", 0, np.float32),
        )
    }  # fmt: skip
    logits, mixed = logits_of(n, seed=5), batch(n, **columns)
    together, _ = sample(PLATFORMS[name], logits, mixed)
    assert together.tolist() == [reference_token(logits, mixed, row) for row in range(n)]
    for row in range(n):
        alone = batch(
            1,
            seeds=mixed.seeds[row : row + 1],
            positions=mixed.positions[row : row + 1],
            **{key: column[row : row + 1] for key, column in columns.items()},
        )
        assert sample(PLATFORMS[name], logits[row : row + 1], alone)[0][0] == together[row]


class CountsReads(TorchOps):
    """Counts what is read from the device."""

    reads = 0

    def to_host(self, x: Any) -> Any:
        self.reads += 1
        return super().to_host(x)


WIDE = {name: kind for name, kind in KNOBS.items() if kind}
MIXED = {
    key: np.array([kind.get(key, default) for kind in WIDE.values()] * 5)
    for key, default in (("temperature", 0.0), ("top_k", VOCAB), ("top_p", 1.0), ("min_p", 0.0))
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("block_bytes", [candidates.BLOCK_BYTES, 3 * 4 * VOCAB], ids=["whole", "in-blocks"])
def test_a_sampler_that_may_not_wait_reads_nothing_and_takes_the_same_tokens(
    block_bytes: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "BLOCK_BYTES", block_bytes)
    n = len(MIXED["temperature"])
    ops, sampling = CountsReads(), batch(n, **MIXED, presence_penalty=0.3, penalty_seeds=fresh_seeds(n))
    logits = ops.from_host(logits_of(n, seed=seed))
    at_once = Sampler(ops, VOCAB, may_wait=False).sample(logits, sampling)
    assert ops.reads == 0
    waiting = Sampler(ops, VOCAB).sample(logits, sampling)
    assert ops.reads > 0
    assert at_once.tokens.tolist() == waiting.tokens.tolist()
    assert len(set(at_once.tokens.tolist())) > n // 2


@pytest.mark.parametrize("top_k", [1, 64, 65, 512, 513, 996])
def test_top_k_bounds_the_candidates_of_a_draw_at_once(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []
    taken = candidates.Candidates
    monkeypatch.setattr(candidates, "Candidates", lambda *given: widths.append(given[3]) or taken(*given))
    logits, sampling = logits_of(6), batch(6, temperature=2.0, top_k=top_k, top_p=0.99)
    tokens, _ = sample(TorchOps(), logits, sampling, sampler=Sampler(TorchOps(), VOCAB, may_wait=False))
    assert tokens.tolist() == [reference_token(logits, sampling, row) for row in range(6)]
    assert widths == [64 if top_k <= 64 else 512 if top_k <= 512 else VOCAB]


def test_tokens_follow_the_distribution() -> None:
    """Fixed seeds, so that this either holds or does not."""
    n = 4000
    row = np.full(VOCAB, -np.inf, np.float32)
    row[[3, 10, 500]] = np.log([0.6, 0.3, 0.1])
    tokens, _ = sample(TorchOps(), np.tile(row, (n, 1)), batch(n, temperature=1.0))
    shares = np.bincount(tokens, minlength=VOCAB)[[3, 10, 500]] / n
    assert np.abs(shares - [0.6, 0.3, 0.1]).max() < 3 * np.sqrt(0.25 / n)


def test_temperatures_too_small_to_divide_by_are_greedy() -> None:
    logits = logits_of(3)
    assert np.array_equal(sample(TorchOps(), logits, batch(3, temperature=1e-30))[0], logits.argmax(1))


class NoDraws(TorchOps):
    """Fails where only a draw has business."""

    def gumbel(self, seeds: Any, positions: Any, ids: Any) -> Any:
        raise AssertionError("noise for greedy rows")

    def log_softmax(self, x: Any) -> Any:
        raise AssertionError("softmax for greedy rows")


def test_greedy_batches_pay_for_no_softmax_and_no_noise() -> None:
    logits = logits_of(4)
    assert np.array_equal(sample(NoDraws(), logits, batch(4))[0], logits.argmax(1))


def test_bias_adds_and_forbids() -> None:
    logits = logits_of(3)
    best = logits.argmax(1)
    sampling = batch(
        3,
        bias_index=np.array([0, 2, 2], np.int32),
        bias_ids=np.array([best[0], 17, 17], np.int32),
        bias_values=np.array([-np.inf, 50, 50], np.float32),
    )
    tokens, _ = sample(TorchOps(), logits, sampling)
    without = logits[0].copy()
    without[best[0]] = -np.inf
    assert tokens.tolist() == [without.argmax(), best[1], 17]


def test_a_mask_binds_only_the_rows_that_have_one() -> None:
    logits = logits_of(2)
    allowed = np.zeros((2, 32 * 32), bool)
    allowed[:, [5, 996]] = True
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)
    tokens, failed = sample(TorchOps(), logits, batch(2, has_mask=np.array([True, False])), words)
    assert tokens[0] == [5, 996][int(logits[0, [5, 996]].argmax())]
    assert tokens[1] == logits[1].argmax()
    tokens, failed = sample(TorchOps(), logits, batch(2, has_mask=np.array([True, False])), words * 0)
    assert failed.tolist() == [True, False]


@pytest.mark.parametrize("name", PLATFORMS)
@pytest.mark.parametrize("knobs", ["greedy", "temperature", "top_p"])
def test_a_broken_row_fails_alone_and_gives_token_0(knobs: str, name: str) -> None:
    logits = logits_of(5)
    logits[1, 700] = np.nan
    logits[3] = -np.inf
    sampling = batch(5, **KNOBS[knobs])
    with np.errstate(invalid="ignore"):
        tokens, failed = sample(PLATFORMS[name], logits, sampling)
    assert failed.tolist() == [False, True, False, True, False]
    assert tokens[[1, 3]].tolist() == [0, 0]
    for row in (0, 2, 4):
        assert tokens[row] == reference_token(logits, sampling, row)


def fresh_seeds(n: int) -> tuple[PenaltySeed, ...]:
    return tuple(seed_of(row, [], {row: 1}) for row in range(1, n + 1))


def seed_of(row_id: int, prompt: list[int], output: dict[int, int]) -> PenaltySeed:
    return PenaltySeed(
        row_id=row_id,
        prompt_ids=np.array(sorted(set(prompt)), np.int32),
        output_ids=np.array(list(output), np.int32),
        output_counts=np.array(list(output.values()), np.int32),
    )


def penalized(ops: Any, logits: np.ndarray, sampling: SamplingBatch, sampler: Sampler) -> np.ndarray:
    """Logits as penalties leave them."""
    counts = sampler._penalties
    counts.seed(sampling.penalty_seeds)
    asking = counts.asking(sampling)
    return ops.to_host(counts.apply(ops.from_host(logits), sampling, asking))


def test_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = logits_of(2)
    ids = [[3, 5, 5, 9, 100], [7, 8, 7, 996, 0]]
    seeds = tuple(seed_of(row + 1, sequence[:3], {sequence[3]: 1, sequence[4]: 1}) for row, sequence in enumerate(ids))
    sampling = batch(2, repetition_penalty=1.4, penalty_seeds=seeds)
    got = penalized(TorchOps(), logits, sampling, Sampler(TorchOps(), VOCAB))
    want = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor(ids), torch.from_numpy(logits.copy()))
    assert np.allclose(got, want.numpy(), rtol=1e-6)


def test_frequency_counts_and_presence_does_not_and_the_prompt_is_spared() -> None:
    logits = logits_of(1)
    sampling = batch(1, frequency_penalty=0.5, presence_penalty=0.25, penalty_seeds=(seed_of(1, [4], {6: 3, 9: 1}),))
    got = penalized(TorchOps(), logits, sampling, Sampler(TorchOps(), VOCAB))
    want = logits.copy()
    want[0, 6] -= 3 * 0.5 + 0.25
    want[0, 9] -= 0.5 + 0.25
    assert np.allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("name", PLATFORMS)
def test_sampled_tokens_count_from_the_next_step_on(name: str) -> None:
    ops = PLATFORMS[name]
    sampler = Sampler(ops, VOCAB)
    logits = np.zeros((2, VOCAB), np.float32)
    logits[:, [10, 20, 30]] = [3.0, 2.5, 2.0]
    first = batch(2, presence_penalty=np.array([1.2, 0], np.float32), penalty_seeds=(seed_of(1, [], {}),))
    later = batch(2, presence_penalty=np.array([1.2, 0], np.float32))
    assert [sample(ops, logits, step, sampler=sampler)[0].tolist() for step in (first, later, later)] == [
        [10, 10], [20, 10], [30, 10],
    ]  # fmt: skip


def test_a_reused_row_starts_afresh() -> None:
    ops, logits = TorchOps(), np.zeros((1, VOCAB), np.float32)
    logits[0, [10, 20]] = [3.0, 2.5]
    sampler = Sampler(ops, VOCAB)
    asks = {"presence_penalty": 1.0}
    fresh = batch(1, **asks, penalty_seeds=(seed_of(1, [], {}),))
    tokens = [sample(ops, logits, step, sampler=sampler)[0][0] for step in (fresh, batch(1, **asks), fresh)]
    assert tokens == [10, 20, 10]
    # another request without penalties takes the row, then one with
    assert sample(ops, logits, batch(1), sampler=sampler)[0][0] == 10
    assert sampler._penalties._lines == {}
    assert sample(ops, logits, fresh, sampler=sampler)[0][0] == 10


def test_counts_survive_growing() -> None:
    ops, n = TorchOps(), 20
    logits = np.zeros((n, VOCAB), np.float32)
    logits[:, [10, 20]] = [3.0, 2.5]
    sampler = Sampler(ops, VOCAB)
    half = batch(5, presence_penalty=1.0, penalty_seeds=tuple(seed_of(row, [], {}) for row in range(1, 6)))
    sample(ops, logits[:5], half, sampler=sampler)
    whole = batch(n, presence_penalty=1.0, penalty_seeds=tuple(seed_of(row, [], {}) for row in range(6, n + 1)))
    tokens, _ = sample(ops, logits, whole, sampler=sampler)
    assert tokens.tolist() == [20] * 5 + [10] * 15
