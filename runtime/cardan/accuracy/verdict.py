"""The verdict over two records: same within noise, drift, or different, with its reasons.

It knows no engine and measures nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cardan.accuracy.fingerprints import Difference, Fingerprint
from cardan.accuracy.noise import Spread, worst

MEAN_FACTOR = 10.0
"""How many times the noise floor's KL two correct platforms may be apart. KL grows with the square of the error, so
this is about three times the error."""
MAX_FACTOR = 30.0
"""The same for the largest of all positions, of which there are more than the floor was measured on."""
MARGIN_FACTOR = 6.0
"""How many times the largest noise of a logprob a margin must be, for its flip to be a fault: both tokens move, each
by up to three times."""
DRIFT_FACTOR = 10.0
"""How many times what noise allows still counts as drift, where nothing explains it."""
EXPLAINED_KL = 0.05
"""Mean KL, in nats, up to which another format or type explains a difference that is called drift."""
EXPLAINED_PERPLEXITY = 0.05
"""Relative difference of perplexities, likewise."""

RESOLUTION: Spread = {"mean": 1e-11, "p99": 1e-10, "max": 1e-9, "moves": 2e-5}
"""What float32 logprobs resolve: no floor is taken to be lower."""
ASSUMED: Mapping[str, Spread] = {
    "float32": {"mean": 1e-9, "p99": 1e-8, "max": 1e-7, "moves": 1e-3},
    "float16": {"mean": 2e-5, "p99": 2e-4, "max": 2e-3, "moves": 0.1},
    "bfloat16": {"mean": 1e-3, "p99": 1e-2, "max": 1e-1, "moves": 0.8},
}
"""Floors by type where none was measured on either side; the report says so."""

IDENTITY = ("architecture", "vocab_size", "tokenizer")
NUMERICS = ("dtype", "kv_dtype")


class Verdict(enum.StrEnum):
    """What a comparison comes to."""

    SAME = "same within noise"
    DRIFT = "drift"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The numbers that a verdict is made from.

    Attributes:
        kl_mean: over all positions, in nats.
        kl_p99: likewise.
        kl_max: likewise.
        where: which position has the largest.
        perplexity_ratio: the second side's over the first's.
        flip: the largest margin among texts that part, and which text that is; None where none does.
    """

    kl_mean: float
    kl_p99: float
    kl_max: float
    where: str
    perplexity_ratio: float
    flip: tuple[float, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A verdict.

    Attributes:
        verdict: the word.
        reasons: why, most important first.
        band: the noise floor that it was judged against: ``mean``, ``p99``, ``max`` of the KL, ``moves`` of logprobs.
        band_from: where the floor came from.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    band: Spread
    band_from: str


def noise_band(
    ours: Mapping[str, Spread], theirs: Mapping[str, Spread], a: Fingerprint, b: Fingerprint
) -> tuple[dict[str, float], str]:
    """The floor for two sides, and where it came from: the larger of both, else what their types suggest."""
    if ours or theirs:
        sides = [worst(noise) for noise in (ours, theirs) if noise]
        band = {name: max(*(side[name] for side in sides), low) for name, low in RESOLUTION.items()}
        known = "both sides" if ours and theirs else "one side only"
        counts = [
            f"{max(spread.get('positions', 0) for spread in noise.values()):.0f} positions of {side.platform}"
            for noise, side in ((ours, a), (theirs, b))
            if noise
        ]
        return band, f"measured on {known}: {' and '.join(counts)}"
    types = [side.dtype if side.dtype in ASSUMED else "bfloat16" for side in (a, b)]
    return {name: max(ASSUMED[kind][name] for kind in types) for name in RESOLUTION}, (
        f"not measured; assumed for {' and '.join(dict.fromkeys(types))}"
    )


def judge(
    measured: Measured,
    differences: Sequence[Difference],
    band: tuple[Spread, str],
    sides: tuple[Fingerprint, Fingerprint],
    unheeded: Sequence[str] = (),
) -> Judgement:
    """The verdict over what was measured.

    Args:
        measured: the numbers.
        differences: of the fingerprints.
        band: how noisy the two sides are, and how that is known.
        sides: who they are.
        unheeded: a reason for each request parameter that one of them does not honour.
    """
    floor, band_from = band
    reasons, verdict = _identity(differences, *sides)
    if unheeded:
        reasons += unheeded
        verdict = Verdict.DIFFERENT
    excess = _excess(measured, floor)
    explained = [item for item in differences if item.weighs and not item.what.startswith("setting")]
    if excess:
        verdict = _worse(verdict, _grade(measured, floor, bool(explained)))
        reasons += excess
        if explained and verdict is Verdict.DRIFT:
            reasons.append("it is as small as what explains it: " + "; ".join(item.describe() for item in explained))
    reasons += _flip(measured, floor)
    if _flip(measured, floor):
        verdict = _worse(verdict, Verdict.DRIFT if explained else Verdict.DIFFERENT)
    if not reasons:
        reasons.append(
            f"mean KL {measured.kl_mean:.2g} is within {MEAN_FACTOR:g} times the noise floor {floor['mean']:.2g}, "
            f"the largest {measured.kl_max:.2g} within {MAX_FACTOR:g} times {floor['max']:.2g}"
        )
    return Judgement(verdict=verdict, reasons=tuple(reasons), band=floor, band_from=band_from)


_ORDER = tuple(Verdict)


def _worse(a: Verdict, b: Verdict) -> Verdict:
    return max(a, b, key=_ORDER.index)


def _identity(differences: Sequence[Difference], a: Fingerprint, b: Fingerprint) -> tuple[list[str], Verdict]:
    """What fingerprints alone settle: other tokens or other weights are another model."""
    reasons: list[str] = []
    verdict = Verdict.SAME
    for item in differences:
        if item.what in IDENTITY:
            reasons.append(f"another model by its {item.describe()}")
            verdict = Verdict.DIFFERENT
        elif item.what.startswith("tensors on one side only"):
            reasons.append(f"the checkpoints have other tensors: {item.describe()}")
            verdict = _worse(verdict, Verdict.DRIFT)
    changed = changed_tensors(a, b)
    if changed:
        shown = ", ".join(changed[:3]) + (" …" if len(changed) > 3 else "")
        reasons.append(f"{len(changed)} tensors of the same format hold other values: {shown}")
        verdict = Verdict.DIFFERENT
    elif any(item.what.startswith("weights of") for item in differences):
        reasons.append("the weights are encoded in other formats, which hold other values")
        verdict = _worse(verdict, Verdict.DRIFT)
    return reasons, verdict


def changed_tensors(a: Fingerprint, b: Fingerprint) -> list[str]:
    """Tensors that both sides have in the same format with other bytes."""
    return [
        name
        for name, ours in a.weights.items()
        if name in b.weights and b.weights[name].fmt == ours.fmt and b.weights[name].encoded != ours.encoded
    ]


def is_noise(spread: Spread, floor: Spread) -> bool:
    """Whether KL lies within what a noise floor allows."""
    return (
        spread["mean"] <= MEAN_FACTOR * floor["mean"]
        and spread["p99"] <= MEAN_FACTOR * floor["p99"]
        and spread["max"] <= MAX_FACTOR * floor["max"]
    )


def _excess(measured: Measured, floor: Spread) -> list[str]:
    """By what the numbers leave the band."""
    found = []
    for name, value, factor in (
        ("mean", measured.kl_mean, MEAN_FACTOR),
        ("p99", measured.kl_p99, MEAN_FACTOR),
        ("max", measured.kl_max, MAX_FACTOR),
    ):
        if value > factor * floor[name]:
            where = f" at {measured.where}" if name == "max" else ""
            found.append(
                f"{name} KL {value:.2g}{where} is {value / floor[name]:.2g} times the noise floor {floor[name]:.2g}; "
                f"{factor:g} times are noise"
            )
    return found


def _grade(measured: Measured, floor: Spread, explained: bool) -> Verdict:
    """How bad numbers outside of the band are."""
    if explained:
        small = measured.kl_mean <= EXPLAINED_KL and abs(measured.perplexity_ratio - 1) <= EXPLAINED_PERPLEXITY
    else:
        small = (
            measured.kl_mean <= DRIFT_FACTOR * MEAN_FACTOR * floor["mean"]
            and measured.kl_max <= DRIFT_FACTOR * MAX_FACTOR * floor["max"]
        )
    return Verdict.DRIFT if small else Verdict.DIFFERENT


def _flip(measured: Measured, floor: Spread) -> list[str]:
    if measured.flip is None or measured.flip[0] <= MARGIN_FACTOR * floor["moves"]:
        return []
    margin, where = measured.flip
    return [
        f"greedy text parts at {where} although one side preferred its token by {margin:.2g} nats, "
        f"more than {MARGIN_FACTOR:g} times the noise of a logprob, {floor['moves']:.2g}"
    ]
