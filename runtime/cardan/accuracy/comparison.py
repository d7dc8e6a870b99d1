"""Compares two golden records: numbers with their bounds, where texts part, and the verdict.

It knows no engine: comparing with a platform means recording there first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cardan.accuracy.answers import Answer, failures, read_answers
from cardan.accuracy.attribution_report import Attribution
from cardan.accuracy.divergence import Flip, agreement, first_flip, kl, margins
from cardan.accuracy.fingerprints import Difference, compare_fingerprints
from cardan.accuracy.golden import Golden, Recorded
from cardan.accuracy.layers import layer_errors
from cardan.accuracy.scores import Scores
from cardan.accuracy.statistics import Estimate, bootstrap, mean, perplexity_difference, quantile
from cardan.accuracy.verdict import Judgement, Measured, judge, noise_band
from cardan.errors import GoldenFileError
from cardan.types import BoolArray, Float64Array

MARGIN_BINS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, np.inf)
"""Margins, in nats, by which agreement is broken down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """KL of some positions, in nats.

    Attributes:
        positions: how many.
        mean: with bounds.
        median: with bounds.
        p99: with bounds.
        largest: of all.
    """

    positions: int
    mean: Estimate
    median: Estimate
    p99: Estimate
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexities:
    """Of the sequences' own tokens.

    Attributes:
        ours: of the first side.
        theirs: of the second.
        difference: second less first, with bounds over positions, which both sides share.
    """

    ours: float
    theirs: float
    difference: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginBin:
    """Agreement where the first side's margin is in a range.

    Attributes:
        low: least margin, in nats.
        high: below this one.
        positions: how many.
        agreeing: how many of them have the same likeliest token.
    """

    low: float
    high: float
    positions: int
    agreeing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One sequence.

    Attributes:
        name: of the case.
        kl: of each position.
        first_position: position of the first of them.
        num_prefill: how many of them are prefill.
        agreement: share of positions with the same likeliest token.
        flip: where greedy texts part, or None.
        text: of the sequence.
        our_text: what the first side went on with.
        their_text: what the second side did.
    """

    name: str
    kl: tuple[float, ...]
    first_position: int
    num_prefill: int
    agreement: float
    flip: Flip | None
    text: str
    our_text: str
    their_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """One request parameter on both sides.

    Attributes:
        name: of the parameter.
        ours: what the first side makes of it; None where that is not known.
        theirs: the same of the second.
    """

    name: str
    ours: Answer | None
    theirs: Answer | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything that two records say of each other.

    Attributes:
        ours: who the first side is.
        theirs: who the second is.
        differences: of the fingerprints, those that weigh first.
        top: likeliest tokens that both have at each position.
        all_positions: KL of all positions; a lower bound, see ``divergence.kl``.
        stages: the same for ``prefill`` and ``decode`` positions.
        agreement: share of positions with the same likeliest token, with bounds.
        by_margin: the same by the first side's margin.
        perplexities: of both.
        cases: one by one.
        layer_errors: relative error of each tapped result, in order; empty where a side has none.
        semantics: request parameters on both sides; empty where neither says anything of them.
        judgement: the verdict.
        attribution: what carries the difference, where that was looked for.
    """

    ours: str
    theirs: str
    differences: tuple[Difference, ...]
    top: int
    all_positions: Divergence
    stages: dict[str, Divergence]
    agreement: Estimate
    by_margin: tuple[MarginBin, ...]
    perplexities: Perplexities
    cases: tuple[CaseResult, ...]
    layer_errors: dict[str, float]
    semantics: tuple[Meaning, ...]
    judgement: Judgement
    attribution: Attribution | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain values; no number is infinite."""
        value = asdict(self)
        for entry in value["by_margin"]:
            entry["high"] = None if np.isinf(entry["high"]) else entry["high"]
        return value


def compare(ours: Golden, theirs: Golden) -> Comparison:
    """Compare the second record with the first.

    Raises:
        GoldenFileError: they are not of the same sequences.
    """
    pairs = _pairs(ours, theirs)
    top = min(ours.top, theirs.top)
    sides = [(a.scores.cut(top), b.scores.cut(top)) for a, b in pairs]
    values = [kl(p, q) for p, q in sides]
    everything = np.concatenate(values)
    logprobs = np.concatenate([np.stack((p.logprobs, q.logprobs), axis=1) for p, q in sides]).astype(np.float64)
    same = np.concatenate([agreement(p, q) for p, q in sides])
    in_prefill = np.concatenate(
        [np.arange(len(kls)) < a.case.num_prefill for kls, (a, _) in zip(values, pairs, strict=True)]
    )
    differences = compare_fingerprints(ours.fingerprint, theirs.fingerprint)
    cases = tuple(_case(pair, kls, side) for pair, kls, side in zip(pairs, values, sides, strict=True))
    perplexities = _perplexities(logprobs)
    divergence = _divergence(everything)
    band = noise_band(ours.noise, theirs.noise, ours.fingerprint, theirs.fingerprint)
    measured = Measured(
        kl_mean=divergence.mean.value,
        kl_p99=divergence.p99.value,
        kl_max=divergence.largest,
        where=_where(cases),
        perplexity_ratio=perplexities.theirs / perplexities.ours,
        flip=_largest_flip(cases),
    )
    return Comparison(
        ours=ours.fingerprint.label,
        theirs=theirs.fingerprint.label,
        differences=differences,
        top=top,
        all_positions=divergence,
        stages=_stages(everything, in_prefill),
        agreement=bootstrap(same.astype(np.float64), mean),
        by_margin=_by_margin(np.concatenate([margins(p) for p, _ in sides]), same),
        perplexities=perplexities,
        cases=cases,
        layer_errors=_layer_errors(ours, theirs),
        semantics=_meanings(ours, theirs),
        judgement=judge(
            measured, differences, band, (ours.fingerprint, theirs.fingerprint), _unheeded(ours) + _unheeded(theirs)
        ),
    )


def _pairs(ours: Golden, theirs: Golden) -> list[tuple[Recorded, Recorded]]:
    """The cases of both, which must be the same sequences cut at the same places."""
    others = {recorded.case.name: recorded for recorded in theirs.cases}
    pairs = []
    for recorded in ours.cases:
        other = others.get(recorded.case.name)
        if other is None or len(others) != len(ours.cases):
            raise GoldenFileError(
                f"The records are of {len(ours.cases)} and {len(others)} prompts, and {recorded.case.name!r} is "
                f"{'not among' if other is None else 'among'} those of the second. Record both with the same prompts."
            )
        if other.case.ids != recorded.case.ids or other.case.score_from != recorded.case.score_from:
            raise GoldenFileError(
                f"Prompt {recorded.case.name!r} has other token ids in the two records, or is scored from another "
                "position: the tokenizers differ, or --prompts or --positions. Record both with the same ones."
            )
        pairs.append((recorded, other))
    return pairs


def _divergence(values: Float64Array) -> Divergence:
    return Divergence(
        positions=len(values),
        mean=bootstrap(values, mean),
        median=bootstrap(values, quantile(0.5)),
        p99=bootstrap(values, quantile(0.99)),
        largest=float(values.max()),
    )


def _stages(values: Float64Array, in_prefill: BoolArray) -> dict[str, Divergence]:
    stages = {"prefill": values[in_prefill], "decode": values[~in_prefill]}
    return {name: _divergence(some) for name, some in stages.items() if len(some)}


def _perplexities(logprobs: Float64Array) -> Perplexities:
    ours, theirs = np.exp(-logprobs.mean(axis=0))
    return Perplexities(ours=float(ours), theirs=float(theirs), difference=bootstrap(logprobs, perplexity_difference))


def _by_margin(gaps: Float64Array, same: BoolArray) -> tuple[MarginBin, ...]:
    found = []
    for low, high in itertools.pairwise(MARGIN_BINS):
        inside = (gaps >= low) & (gaps < high)
        found.append(MarginBin(low=low, high=high, positions=int(inside.sum()), agreeing=int(same[inside].sum())))
    return tuple(found)


def _case(pair: tuple[Recorded, Recorded], values: Float64Array, side: tuple[Scores, Scores]) -> CaseResult:
    ours, theirs = pair
    flip = None if ours.greedy is None or theirs.greedy is None else first_flip(ours.greedy, theirs.greedy)
    return CaseResult(
        name=ours.case.name,
        kl=tuple(float(value) for value in values),
        first_position=ours.case.score_from,
        num_prefill=ours.case.num_prefill,
        agreement=float(agreement(*side).mean()),
        flip=flip,
        text=ours.text,
        our_text=ours.greedy_text,
        their_text=theirs.greedy_text,
    )


def _where(cases: Sequence[CaseResult]) -> str:
    worst = max(cases, key=lambda case: max(case.kl))
    at = int(np.argmax(worst.kl))
    stage = "prefill" if at < worst.num_prefill else "decode"
    return f"position {worst.first_position + at} of {worst.name!r} ({stage})"


def _largest_flip(cases: Sequence[CaseResult]) -> tuple[float, str] | None:
    flips = [(case.flip.least_margin, f"token {case.flip.at} after {case.name!r}") for case in cases if case.flip]
    return max(flips, default=None)


def _meanings(ours: Golden, theirs: Golden) -> tuple[Meaning, ...]:
    a, b = (read_answers(side.semantics) for side in (ours, theirs))
    return tuple(Meaning(name=name, ours=a.get(name), theirs=b.get(name)) for name in dict.fromkeys((*a, *b)))


def _unheeded(side: Golden) -> list[str]:
    return failures(read_answers(side.semantics), side.fingerprint.platform)


def _layer_errors(ours: Golden, theirs: Golden) -> dict[str, float]:
    if ours.layers is None or theirs.layers is None or ours.layers.seed != theirs.layers.seed:
        return {}
    return layer_errors(ours.layers, theirs.layers)
