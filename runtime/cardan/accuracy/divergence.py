"""How far two models' words on the same positions are apart: Kullback-Leibler divergence, agreement, perplexity.

It knows no file and judges nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cardan.accuracy.scores import Greedy, Scores
from cardan.types import BoolArray, Float64Array

SMOOTHING = 1e-6
"""Mass that the rest gets on both sides. Without it, a rest that is smaller than float32 rounds would be noise alone.
Mixing both sides with the same distribution only lowers the divergence, so it stays a lower bound."""
LIKELY = 1e-4
"""Tokens whose logprobs are looked at one by one are at least so probable."""


def kl(p: Scores, q: Scores) -> Float64Array:
    """KL(p || q) of each position, in nats, as far as both sides' likeliest tokens show it, ``[n]``.

    All tokens that are not among the likeliest on both sides count as one. That can only lower the divergence (data
    processing inequality), so this is a lower bound of that over the whole vocabulary.

    Source: Cover and Thomas, "Elements of Information Theory", theorem 2.8.1.
    """
    same = p.top_ids[:, :, None] == q.top_ids[:, None, :]
    shared: BoolArray = same.any(axis=2)
    p_top, q_top = (np.exp(side.top_logprobs.astype(np.float64)) for side in (p, q))
    q_there = np.take_along_axis(q_top, same.argmax(axis=2), axis=1)
    p_mass, q_mass = np.where(shared, p_top, 0.0), np.where(shared, q_there, 0.0)
    p_rest = np.exp(p.rest.astype(np.float64)) + p_top.sum(axis=1) - p_mass.sum(axis=1)
    q_rest = np.exp(q.rest.astype(np.float64)) + q_top.sum(axis=1) - q_mass.sum(axis=1)
    p_all, q_all = (
        np.concatenate((rest[:, None], mass), axis=1) for rest, mass in ((p_rest, p_mass), (q_rest, q_mass))
    )
    p_all, q_all = (side / side.sum(axis=1, keepdims=True) for side in (p_all, q_all))
    p_all[:, 0] += SMOOTHING
    q_all[:, 0] += SMOOTHING
    p_all, q_all = (np.maximum(side / (1.0 + SMOOTHING), 1e-300) for side in (p_all, q_all))
    terms = np.where(p_all > 1e-299, p_all * (np.log(p_all) - np.log(q_all)), 0.0)
    return np.asarray(np.maximum(terms.sum(axis=1), 0.0))


def agreement(p: Scores, q: Scores) -> BoolArray:
    """Whether both sides hold the same token for the likeliest, at each position."""
    return np.asarray(p.top_ids[:, 0] == q.top_ids[:, 0])


def margins(p: Scores) -> Float64Array:
    """By how much the likeliest token's logprob is above the second's, at each position."""
    if p.top_logprobs.shape[1] < 2:
        return np.full(p.num_positions, np.inf)
    return (p.top_logprobs[:, 0] - p.top_logprobs[:, 1]).astype(np.float64)


def logprob_moves(p: Scores, q: Scores) -> Float64Array:
    """By how much each position's likely tokens moved at most, in nats, ``[n]``."""
    same = p.top_ids[:, :, None] == q.top_ids[:, None, :]
    q_there = np.take_along_axis(q.top_logprobs, same.argmax(axis=2), axis=1).astype(np.float64)
    counted = same.any(axis=2) & (p.top_logprobs > np.log(LIKELY))
    return np.asarray(np.where(counted, np.abs(p.top_logprobs - q_there), 0.0).max(axis=1))


@dataclass(frozen=True, slots=True)
class Flip:
    """Where two greedy texts part.

    Attributes:
        at: index of the first token that differs.
        margin: by how much the first side preferred its own token to its second choice, in nats.
        other_margin: the same on the second side.
    """

    at: int
    margin: float
    other_margin: float

    @property
    def least_margin(self) -> float:
        """The smaller of the two: how little it takes to turn one side's choice."""
        return min(self.margin, self.other_margin)


def first_flip(p: Greedy, q: Greedy) -> Flip | None:
    """Where two greedy texts part, or None where they do not."""
    count = min(len(p.ids), len(q.ids))
    differs = np.flatnonzero(p.ids[:count] != q.ids[:count])
    if not len(differs):
        return None
    at = int(differs[0])
    return Flip(at, float(p.margins[at]), float(q.margins[at]))
