"""Numbers of a comparison against the same computed over whole distributions, and statistics against tables."""

from __future__ import annotations

import numpy as np
import pytest

from cardan.accuracy.divergence import agreement, first_flip, kl, logprob_moves, margins
from cardan.accuracy.scores import Greedy, from_logits
from cardan.accuracy.statistics import bootstrap, chi_square_p, chi_square_test, mean, perplexity_difference, quantile


def distributions(vocab: int, spread: float, count: int = 200, scale: float = 4.0):
    rng = np.random.default_rng(3)
    logits = scale * rng.standard_normal((count, vocab))
    other = logits + spread * rng.standard_normal(logits.shape)
    return logits, other, rng.integers(0, vocab, count)


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def whole_kl(logits, other):
    p, q = softmax(logits), softmax(other)
    return (p * np.log(p / q)).sum(axis=1)


@pytest.mark.parametrize("spread", [0.01, 0.1, 1.0])
def test_kl_is_that_of_the_whole_vocabulary_where_all_of_it_is_kept(spread: float) -> None:
    logits, other, targets = distributions(50, spread)
    found = kl(from_logits(logits, targets, 50), from_logits(other, targets, 50))
    assert found.mean() == pytest.approx(whole_kl(logits, other).mean(), rel=1e-3)


@pytest.mark.parametrize("spread", [1e-4, 0.01, 0.3, 3.0])
@pytest.mark.parametrize("top", [1, 8, 64])
def test_kl_of_the_likeliest_is_a_lower_bound(spread: float, top: int) -> None:
    logits, other, targets = distributions(500, spread)
    found = kl(from_logits(logits, targets, top), from_logits(other, targets, top))
    assert (found <= whole_kl(logits, other) * (1 + 1e-5) + 1e-9).all()
    assert (found >= 0).all()


def test_the_bound_is_that_of_the_same_partition() -> None:
    """Tokens beyond those that both sides list are one class: computed here token by token."""
    logits, other, targets = distributions(300, 0.5, count=20)
    p, q = softmax(logits), softmax(other)
    found = kl(from_logits(logits, targets, 16), from_logits(other, targets, 16))
    for row in range(20):
        both = set(np.argsort(-p[row])[:16]) & set(np.argsort(-q[row])[:16])
        ids = sorted(both)
        masses = [np.append(side[row, ids], 1 - side[row, ids].sum()) for side in (p, q)]
        want = float((masses[0] * np.log(masses[0] / masses[1])).sum())
        assert found[row] == pytest.approx(want, rel=1e-3, abs=1e-7)


def test_equal_sides_have_no_divergence() -> None:
    logits, _, targets = distributions(100, 0.0)
    scores = from_logits(logits, targets, 8)
    assert kl(scores, scores).max() < 1e-12
    assert agreement(scores, scores).all()
    assert logprob_moves(scores, scores).max() == 0


def test_scores_are_those_of_the_logits() -> None:
    logits, _, targets = distributions(100, 0.0)
    scores = from_logits(logits, targets, 8)
    p = softmax(logits)
    assert np.allclose(scores.logprobs, np.log(p[np.arange(len(targets)), targets]), atol=1e-5)
    assert np.allclose(np.exp(scores.rest), 1 - np.sort(p, axis=1)[:, -8:].sum(axis=1), atol=1e-6)
    cut = scores.cut(3)
    assert np.allclose(np.exp(cut.rest), 1 - np.sort(p, axis=1)[:, -3:].sum(axis=1), atol=1e-6)
    ordered = np.sort(np.log(p), axis=1)
    assert np.allclose(margins(scores), ordered[:, -1] - ordered[:, -2], atol=1e-5)


def test_moves_are_of_likely_tokens() -> None:
    logits, _, targets = distributions(100, 0.0)
    other = logits.copy()
    other[:, 7] += 0.1
    moved = logprob_moves(from_logits(logits, targets, 100), from_logits(other, targets, 100))
    there = softmax(logits)[:, 7] > 1e-3
    assert (moved[there] > 0.05).all()
    assert (moved < 0.1001).all()


def test_texts_part_at_their_first_difference() -> None:
    def text(*ids: int) -> Greedy:
        return Greedy(
            ids=np.asarray(ids, np.int32),
            logprobs=np.zeros(len(ids), np.float32),
            margins=np.arange(1, len(ids) + 1, dtype=np.float32),
        )

    assert first_flip(text(1, 2, 3), text(1, 2, 3)) is None
    flip = first_flip(text(1, 2, 3, 4), text(1, 2, 9, 9))
    assert flip is not None
    assert (flip.at, flip.least_margin) == (2, 3.0)


def test_bounds_hold_the_truth_about_as_often_as_they_say() -> None:
    """Of neighbours that depend on each other, too: each value here counts for four positions."""
    rng = np.random.default_rng(1)
    inside = 0
    for trial in range(100):
        values = np.repeat(rng.exponential(1.0, 100), 4)
        estimate = bootstrap(values, mean, seed=trial, resamples=200)
        assert estimate.low <= estimate.value <= estimate.high
        inside += estimate.low <= 1.0 <= estimate.high
    assert 85 <= inside <= 100


def test_quantiles_and_perplexities_have_bounds() -> None:
    values = np.arange(1000, dtype=np.float64)
    estimate = bootstrap(values, quantile(0.5))
    assert estimate.value == pytest.approx(499.5)
    assert estimate.low < 499.5 < estimate.high
    logprobs = np.stack((np.full(400, -2.0), np.full(400, -2.1)), axis=1)
    difference = bootstrap(logprobs, perplexity_difference)
    assert difference.value == pytest.approx(np.exp(2.1) - np.exp(2.0))
    assert difference.excludes_zero
    alone = bootstrap(values[:1], mean)
    assert (alone.low, alone.high) == (0.0, 0.0)
    assert not alone.excludes_zero


@pytest.mark.parametrize(
    ("statistic", "freedom", "probability"),
    # Abramowitz and Stegun, table 26.8, and its neighbours
    [
        (3.84146, 1, 0.05),
        (6.63490, 1, 0.01),
        (18.3070, 10, 0.05),
        (15.9872, 10, 0.1),
        (124.342, 100, 0.05),
        (2.70554, 1, 0.1),
    ],
)
def test_chi_square_is_that_of_the_tables(statistic: float, freedom: int, probability: float) -> None:
    assert chi_square_p(statistic, freedom) == pytest.approx(probability, rel=1e-4)


def test_chi_square_of_counts() -> None:
    rng = np.random.default_rng(2)
    weights = np.array([0.5, 0.3, 0.15, 0.04, 0.009, 0.001])
    counts = np.bincount(rng.choice(6, 4000, p=weights), minlength=6).astype(np.float64)
    assert chi_square_test(counts, 4000 * weights)[2] > 0.001
    wrong = np.array([0.45, 0.35, 0.15, 0.04, 0.009, 0.001])
    assert chi_square_test(counts, 4000 * wrong)[2] < 1e-6
    assert chi_square_test(np.array([5.0, 1.0]), np.array([6.0, 0.0])) == (np.inf, 0, 0.0)
    assert chi_square_p(0, 3) == 1.0
