"""Fits the polynomials of src/simd/functions.h and prints them: least squares, weights moved until the error is level.

It is not part of the package. Run it with numpy and mpmath installed; it takes some seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mpmath as mp
import numpy as np

ROUNDS = 200
POINTS = 1500

mp.mp.dps = 30


def fit(function: Callable[[float], mp.mpf], low: float, high: float, terms: int) -> tuple[list[float], float]:
    """Coefficients of ``terms`` powers for ``function`` over a range, and the largest relative error.

    Source: Lawson's algorithm (J. R. Rice and K. H. Usow, "The Lawson algorithm and extensions", 1968).
    """
    x = 0.5 * (low + high) + 0.5 * (high - low) * np.cos(np.linspace(0, math.pi, POINTS))
    want = np.array([float(function(mp.mpf(value))) for value in x])
    powers = np.vander(x, terms, increasing=True) / want[:, None]
    weights = np.ones(POINTS)
    best, error = np.zeros(terms), math.inf
    for _ in range(ROUNDS):
        root = np.sqrt(weights)
        coefficients = np.linalg.lstsq(powers * root[:, None], root, rcond=None)[0]
        off = np.abs(powers @ coefficients - 1.0)
        if off.max() < error:
            best, error = coefficients, off.max()
        weights *= off + 1e-30
        weights /= weights.sum()
    return [float(np.float32(value)) for value in best], error


def exp_rest(r: mp.mpf) -> mp.mpf:
    """``(e^r - 1 - r) / r^2``."""
    return mp.mpf("0.5") + r / 6 if abs(r) < 1e-9 else (mp.expm1(r) - r) / r**2


def tanh_rest(square: mp.mpf) -> mp.mpf:
    """``(tanh(x) - x) / x^3`` as a function of ``x^2``."""
    x = mp.sqrt(square)
    return mp.mpf(-1) / 3 + 2 * square / 15 if square < 1e-9 else (mp.tanh(x) - x) / x**3


def erf_over_x(square: mp.mpf) -> mp.mpf:
    """``erf(x / sqrt(2)) / 2 / x`` as a function of ``x^2``."""
    x = mp.sqrt(square)
    return 1 / mp.sqrt(2 * mp.pi) if square < 1e-12 else mp.erf(x / mp.sqrt(2)) / 2 / x


def tail(t: mp.mpf) -> mp.mpf:
    """``erfc(x / sqrt(2)) / 2 * e^(x^2 / 2) / t`` for ``t = 1 / (1 + x / 2)``."""
    x = 2 * (1 / t - 1)
    return mp.erfc(x / mp.sqrt(2)) / 2 * mp.exp(x**2 / 2) / t


def main() -> None:
    """Print what is fitted."""
    half = math.log(2) / 2
    for name, function, low, high, terms in (
        ("exp", exp_rest, -half * 1.01, half * 1.01, 5),
        ("tanh", tanh_rest, 0.0, 0.391, 5),
        ("erf near 0", erf_over_x, 0.0, 1.0, 6),
        ("erfc beyond", tail, 1 / (1 + 14.0 / 2), 1 / (1 + 1.0 / 2), 8),
    ):
        coefficients, error = fit(function, low, high, terms)
        print(f"{name}: {', '.join(f'{value:.9g}f' for value in coefficients)}  // relative error {error:.1e}")


if __name__ == "__main__":
    main()
