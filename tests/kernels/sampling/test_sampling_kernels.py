"""Noise, scores and tokens to the bit as numpy's Philox and the runner's sampler on numpy have them, interpreted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cardan.ops import philox
from cardan.ops.reference import ReferenceOps
from cardan.runner.sampler import Sampler
from cardan.types import PenaltySeed, SamplingBatch
from cardan_kernels.sampling import DrawInputs, Penalties, SparseBias, add_at, adjust_logits, draw_tokens, gumbel

tensor = torch.from_numpy
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning")


def halves(seeds: np.ndarray) -> torch.Tensor:
    return tensor(np.ascontiguousarray(seeds).view(np.int32).reshape(-1, 2).copy())


def batch(rows: int, vocab: int, **changes: Any) -> SamplingBatch:
    zeros = np.zeros(rows, np.float32)
    fields: dict[str, Any] = {
        "row_ids": np.arange(rows, dtype=np.int32),
        "temperature": zeros + 1,
        "top_k": np.full(rows, vocab, np.int32),
        "top_p": zeros + 1,
        "min_p": zeros,
        "seeds": np.random.default_rng(rows).integers(0, 2**63, rows, dtype=np.uint64) * np.uint64(2),
        "positions": np.arange(rows, dtype=np.int32) * 977,
        "frequency_penalty": zeros,
        "presence_penalty": zeros,
        "repetition_penalty": zeros + 1,
        "bias_index": np.zeros(0, np.int32),
        "bias_ids": np.zeros(0, np.int32),
        "bias_values": np.zeros(0, np.float32),
        "want_logprobs": np.zeros(rows, bool),
        "top_logprobs": np.zeros(rows, np.int32),
        "has_mask": np.zeros(rows, bool),
    }
    fields |= {
        name: np.asarray(value, fields[name].dtype) if name in fields else value for name, value in changes.items()
    }
    return SamplingBatch(**fields)


def inputs(sampling: SamplingBatch) -> DrawInputs:
    return DrawInputs(
        temperature=tensor(sampling.temperature),
        top_k=tensor(sampling.top_k),
        top_p=tensor(sampling.top_p),
        min_p=tensor(sampling.min_p),
        seeds=halves(sampling.seeds),
        positions=tensor(sampling.positions),
    )


def reference(logits: np.ndarray, sampling: SamplingBatch, mask: np.ndarray | None = None) -> Any:
    return Sampler(ReferenceOps("float32"), logits.shape[1]).sample(logits, sampling, mask)


def test_noise_has_the_bits_of_numpys() -> None:
    rng = np.random.default_rng(0)
    seeds = np.array([0, 1, 2**32, 2**64 - 1, 0x123456789ABCDEF0], np.uint64)
    positions = np.array([0, 1, 2**31 - 1, 5, 77], np.int32)
    ids = rng.integers(0, 2**31 - 1, (5, 7)).astype(np.int32)
    assert np.array_equal(gumbel(halves(seeds), tensor(positions), 1027).numpy(), philox.gumbel(seeds, positions, 1027))
    given = torch.zeros(5, 7)
    assert gumbel(halves(seeds), tensor(positions), tensor(ids), out=given) is given
    assert np.array_equal(given.numpy(), philox.gumbel(seeds, positions, ids))
    assert gumbel(halves(seeds)[:0], tensor(positions)[:0], 9).shape == (0, 9)


CASES = {
    "greedy": {"temperature": [0, 1e-6]},
    "whole": {"temperature": [0.7, 1.3]},
    "top-k": {"top_k": [5, 1]},
    "top-p": {"top_p": [0.9, 0.3]},
    "min-p": {"min_p": [0.2, 0.01]},
    "all": {"temperature": [0.8, 2.0], "top_k": [40, 200], "top_p": [0.95, 0.5], "min_p": [0.02, 0.0]},
}


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_sampler(case: str, ties: bool) -> None:
    rng = np.random.default_rng(len(case))
    logits = (rng.standard_normal((2, 301)) * 3).astype(np.float32)
    if ties:
        logits = np.round(logits)
    sampling = batch(2, 301, **CASES[case])
    tokens, failed = draw_tokens(tensor(logits), inputs(sampling))
    assert tokens.tolist() == reference(logits, sampling).tokens.tolist()
    assert not bool(failed.any())


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(8))
def test_tokens_of_many_rows_are_those_of_the_sampler(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, vocab = 24, 5003
    logits = (rng.standard_normal((rows, vocab)) * rng.choice([1, 3, 6])).astype(np.float32)
    if seed % 2:
        logits = np.round(logits * 2) / 2
    sampling = batch(
        rows,
        vocab,
        temperature=rng.choice([0, 0.5, 1, 1.3], rows),
        top_k=rng.choice([vocab, 1, 5, 40, 300], rows),
        top_p=rng.choice([1, 0.9, 0.5, 0.99, 0.05], rows),
        min_p=rng.choice([0, 0, 0.05, 0.3], rows),
        seeds=rng.integers(0, 2**63, rows, dtype=np.uint64),
    )
    assert draw_tokens(tensor(logits), inputs(sampling))[0].tolist() == reference(logits, sampling).tokens.tolist()


@pytest.mark.parametrize("rows", [3, pytest.param(40, marks=pytest.mark.exhaustive)])
def test_filters_keep_what_they_should(rows: int) -> None:
    """Of the tokens below the cut none is drawn under any seed, and with enough seeds all above it are."""
    logits = np.zeros((rows, 12), np.float32)
    logits[:, 3:9] = 2.0  # six equal ones, of which top-k keeps the first four
    # each of the six weighs a sixth of what top-k leaves, so that a little more than two of them need a third
    for changes, kept in (
        ({"top_k": [4] * rows}, {3, 4, 5, 6}),
        ({"top_k": [6] * rows, "top_p": [0.4] * rows}, {3, 4, 5}),
    ):
        sampling = batch(rows, 12, seeds=np.arange(rows), **changes)
        drawn = set(draw_tokens(tensor(logits), inputs(sampling))[0].tolist())
        assert drawn <= kept
        assert rows < 40 or drawn == kept


def test_rows_fail_that_hold_nan_or_may_take_no_token() -> None:
    logits = np.zeros((4, 40), np.float32)
    logits[1, 39] = np.nan
    logits[2] = -np.inf
    logits[3, :39] = -np.inf
    sampling = batch(4, 40)
    tokens, failed = torch.full((4,), 9, dtype=torch.int32), torch.zeros(4, dtype=torch.bool)
    given = draw_tokens(tensor(logits), inputs(sampling), tokens=tokens, failed=failed)
    assert given[0] is tokens
    assert given[1] is failed
    assert failed.tolist() == [False, True, True, False]
    assert tokens[1:].tolist() == [0, 0, 39]
    model = np.zeros((4, 40), np.float32)
    model[0, 1] = np.nan
    assert draw_tokens(tensor(np.zeros_like(model)), inputs(sampling), logits=tensor(model))[1].tolist() == [
        *(True, False, False, False),
    ]


@pytest.mark.parametrize("masked", [False, True])
def test_scores_are_those_of_the_sampler_to_the_bit(masked: bool) -> None:
    vocab, rng = 70, np.random.default_rng(3)
    logits = (rng.standard_normal((3, vocab)) * 4).astype(np.float32)
    seed = PenaltySeed(
        row_id=1,
        prompt_ids=np.array([2, 3, 5], np.int32),
        output_ids=np.array([3, 60], np.int32),
        output_counts=np.array([2, 7], np.int32),
    )
    mask = rng.integers(0, 2**32, (3, 3), dtype=np.uint64).astype(np.uint32)
    mask[0] = 0xFFFFFFFF
    sampling = batch(
        *(3, vocab),
        frequency_penalty=[0, 0.3, 0],
        presence_penalty=[0, -0.7, 0],
        repetition_penalty=[1, 1.7, 1],
        bias_index=[0, 2, 2],
        bias_ids=[4, 9, 10],
        bias_values=[3.25, -np.inf, -1.5],
        penalty_seeds=(seed,),
        has_mask=[False, masked, masked],
    )
    sampler = Sampler(ReferenceOps("float32"), vocab)
    sampler._penalties.seed(sampling.penalty_seeds)
    want = sampler._adjust(logits, sampling, sampler._penalties.asking(sampling), mask if masked else None)
    prompt, output = np.zeros((2, vocab), np.float32), np.zeros((2, vocab), np.float32)
    prompt[1, seed.prompt_ids] = 1
    output[1, seed.output_ids] = seed.output_counts
    got = adjust_logits(
        tensor(logits),
        penalties=Penalties(
            lines=torch.tensor([-1, 1, -1], dtype=torch.int32),
            prompt=tensor(prompt),
            output=tensor(output),
            repetition=tensor(sampling.repetition_penalty),
            frequency=tensor(sampling.frequency_penalty),
            presence=tensor(sampling.presence_penalty),
        ),
        mask=tensor(mask.view(np.int32)) if masked else None,
        bias=SparseBias(
            rows=tensor(np.append(sampling.bias_index, -1).astype(np.int32)),
            ids=tensor(np.append(sampling.bias_ids, 0).astype(np.int32)),
            values=tensor(np.append(sampling.bias_values, 99).astype(np.float32)),
        ),
    )
    assert np.array_equal(got.numpy(), want)


def test_nothing_to_do_copies_the_logits() -> None:
    logits, out = torch.arange(12.0).reshape(2, 6), torch.zeros(2, 6)
    assert adjust_logits(logits, out=out) is out
    assert torch.equal(out, logits)


def test_sampled_tokens_are_counted_in_the_lines_of_their_rows() -> None:
    counts = torch.zeros(3, 5)
    lines = torch.tensor([2, -1, 0, 2], dtype=torch.int32)
    add_at(counts, lines, torch.tensor([4, 1, 1, 4], dtype=torch.int32), torch.ones(4))
    assert counts.tolist() == [[0, 1, 0, 0, 0], [0] * 5, [0, 0, 0, 0, 2]]
