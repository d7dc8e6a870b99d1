"""Sampling in float64 by its definition: penalties, bias, mask, filters, Gumbel noise; what platforms are held to.

It knows no platform. Where two scores tie within what float32 can tell apart, it says so and names no token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cardan.ops import philox
from cardan.ops.definitions import NumpyArray

SCORE_MARGIN = 1e-5
"""Scores that tie within this may come out either way on two platforms: what the seam promises, and no more. It is
meant for scores up to ``SCORE_SIZE``; larger ones are coarser in float32."""
SCORE_SIZE = 16.0
SHARE_MARGIN = 1e-6
"""Boundaries of top-p and min-p that lie within this of a share may, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """How one token is chosen, as in ``SamplingParams``."""

    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias: dict[int, float] = field(default_factory=dict)


def adjust(logits: NumpyArray, knobs: Knobs, prompt: list[int], output: list[int]) -> NumpyArray:
    """Logits ``[vocab]`` after penalties and bias.

    Source: repetition: Keskar et al., "CTRL", section 4.1; frequency and presence: OpenAI's API reference.
    """
    scores = logits.astype(np.float64).copy()
    counts = np.bincount(np.asarray(output, np.int64), minlength=len(scores)).astype(np.float64)
    seen = counts > 0
    seen[np.asarray(prompt, np.int64)] = True
    repetition = knobs.repetition_penalty
    scores = np.where(seen, np.where(scores > 0, scores / repetition, scores * repetition), scores)
    scores -= knobs.frequency_penalty * counts + knobs.presence_penalty * (counts > 0)
    for token, value in knobs.bias.items():
        scores[token] += value
    return scores


def choose(scores: NumpyArray, knobs: Knobs, position: int, off: float = 0.0) -> int | None:
    """The token that adjusted scores give at a position, or None where that is too close to call.

    Args:
        scores: ``[vocab]``, after penalties and bias.
        knobs: how the token is chosen.
        position: of the token.
        off: how far each score may be off before it is divided by the temperature.

    Source: Maddison et al., "A* Sampling", section 2 (the Gumbel-max trick).
    """
    if knobs.temperature < 1e-5:
        return _clear_best(np.arange(len(scores)), scores, off)
    scaled, off = scores / knobs.temperature, off / knobs.temperature
    keep = len(scores) if knobs.top_k < 1 else min(knobs.top_k, len(scores))
    ranked = np.argsort(-scaled, kind="stable")
    order = ranked[:keep]
    if keep < len(scores) and scaled[ranked[keep - 1]] - scaled[ranked[keep]] < _margin(scaled[ranked[keep]], off):
        return None
    shares = np.exp(scaled[order] - scaled[order[0]])
    shares /= shares.sum()
    boundary = SHARE_MARGIN + np.expm1(2 * off)
    if knobs.top_p < 1:
        reached = np.cumsum(shares)
        if np.abs(reached - knobs.top_p).min() < boundary:
            return None
        count = int(np.searchsorted(reached, knobs.top_p, side="left")) + 1
        order, shares = order[:count], shares[:count]
    if knobs.min_p > 0:
        if np.abs(shares / shares[0] - knobs.min_p).min() < boundary:
            return None
        order = order[shares >= knobs.min_p * shares[0]]
    noise = philox.gumbel(np.array([knobs.seed], np.uint64), np.array([position], np.int32), len(scores))[0]
    return _clear_best(order, scaled[order] + noise[order], off)


def _margin(score: float, off: float) -> float:
    return SCORE_MARGIN * max(1.0, abs(score) / SCORE_SIZE) + 2 * off


def _clear_best(tokens: NumpyArray, scores: NumpyArray, off: float) -> int | None:
    if len(tokens) == 1:
        return int(tokens[0])
    second, first = np.argsort(scores, kind="stable")[-2:]
    clear = scores[first] - scores[second] >= _margin(float(scores[first]), off)
    return int(tokens[first]) if clear else None
