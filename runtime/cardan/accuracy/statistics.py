"""Bounds on means and quantiles by resampling, and the chi-square test.

They know no model. Positions of a text depend on each other, so blocks of neighbours are resampled, not positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cardan.types import Float64Array

BLOCK = 16
"""Neighbouring positions that are drawn together."""
RESAMPLES = 1000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and the bounds between which it lies.

    Attributes:
        value: the estimate.
        low: lower bound of the confidence interval.
        high: upper bound.
    """

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether zero is outside the interval."""
        return self.low > 0 or self.high < 0


def bootstrap(
    values: Float64Array, statistic: Callable[[Float64Array], Float64Array], seed: int = 0, resamples: int = RESAMPLES
) -> Estimate:
    """A statistic of values ``[n]`` or ``[n, m]`` with its bounds, by drawing blocks of neighbours with replacement.

    Args:
        values: one row per position.
        statistic: takes ``[resamples, n, ...]`` and reduces axis 1.
        seed: of the draws.
        resamples: how many.

    Source: Künsch, "The Jackknife and the Bootstrap for General Stationary Observations", 1989.
    """
    count = values.shape[0]
    own = float(statistic(values[None])[0])
    if count < 2:
        return Estimate(own, own, own)
    block = min(BLOCK, max(1, count // 8))
    blocks = -(-count // block)
    rng = np.random.default_rng(seed)
    found = []
    for start in range(0, resamples, 100):
        size = min(100, resamples - start)
        begins = rng.integers(0, count - block + 1, (size, blocks))
        index = (begins[:, :, None] + np.arange(block)).reshape(size, -1)[:, :count]
        found.append(statistic(values[index]))
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(np.concatenate(found), (tail, 1 - tail))
    return Estimate(own, min(float(low), own), max(float(high), own))


def mean(values: Float64Array) -> Float64Array:
    """Means over axis 1."""
    return np.asarray(values.mean(axis=1))


def quantile(q: float) -> Callable[[Float64Array], Float64Array]:
    """Quantiles over axis 1."""
    return lambda values: np.asarray(np.quantile(values, q, axis=1))


def perplexity_difference(values: Float64Array) -> Float64Array:
    """Second side's perplexity less the first's, for logprobs ``[resamples, n, 2]``."""
    perplexities = np.exp(-values.mean(axis=1))
    return np.asarray(perplexities[:, 1] - perplexities[:, 0])


def chi_square_p(statistic: float, freedom: int) -> float:
    """Probability that a chi-square variable with ``freedom`` degrees of freedom is at least ``statistic``.

    Source: Abramowitz and Stegun, 6.5.29 (series) and 6.5.31 (continued fraction, Lentz's method).
    """
    if statistic <= 0 or freedom <= 0:
        return 1.0
    a, x = freedom / 2.0, statistic / 2.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1.0 / a
        n = a
        while abs(term) > abs(total) * 1e-15:
            n += 1
            term *= x / n
            total += term
        return max(0.0, 1.0 - total * scale)
    return min(1.0, scale * _continued_fraction(a, x))


def _continued_fraction(a: float, x: float) -> float:
    tiny = 1e-300
    b = x + 1.0 - a
    c, d = 1.0 / tiny, 1.0 / b
    value = d
    for i in range(1, 10_000):
        factor = -i * (i - a)
        b += 2.0
        d = factor * d + b
        d = 1.0 / (d if abs(d) > tiny else tiny)
        c = b + factor / c
        c = c if abs(c) > tiny else tiny
        value *= d * c
        if abs(d * c - 1.0) < 1e-15:
            break
    return value


def chi_square_test(counts: Float64Array, expected: Float64Array, least: float = 5.0) -> tuple[float, int, float]:
    """Pearson's test of counts against expected counts; classes that expect less than ``least`` are put together.

    Returns:
        The statistic, its degrees of freedom, and the probability of one as large by chance. Counts where nothing is
        expected give a probability of 0.
    """
    impossible = expected <= 0
    if counts[impossible].sum() > 0:
        return math.inf, 0, 0.0
    counts, expected = counts[~impossible], expected[~impossible]
    order = np.argsort(-expected)
    counts, expected = counts[order], expected[order]
    large = expected >= least
    grouped, wanted = list(counts[large]), list(expected[large])
    rest, rest_wanted = float(counts[~large].sum()), float(expected[~large].sum())
    if rest_wanted >= least or not wanted:
        grouped.append(rest)
        wanted.append(rest_wanted)
    elif rest_wanted > 0:
        grouped[-1] += rest
        wanted[-1] += rest_wanted
    got, want = np.asarray(grouped), np.asarray(wanted)
    statistic = float(((got - want) ** 2 / want).sum())
    freedom = len(got) - 1
    return statistic, freedom, chi_square_p(statistic, freedom)
