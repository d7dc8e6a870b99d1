"""The noise floor: how far one platform is from itself when the same sequences are run in other ways.

It knows no second platform. Each way must give the same model; what it moves is rounding, and the measure of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from cardan.accuracy.cases import Case, limited
from cardan.accuracy.divergence import agreement, kl, logprob_moves, margins
from cardan.accuracy.golden import NOISE_NUMBERS
from cardan.accuracy.rounding import Pusher
from cardan.accuracy.scores import Scores
from cardan.accuracy.session import Progress, Session, Way
from cardan.accuracy.watching import watch

POSITIONS = 240
"""Scored positions that the floor is measured on where no other number is asked for."""
ROUNDING_SEEDS = (1, 2)
Spread = Mapping[str, float]
"""What one way moves: ``mean``, ``p99`` and ``max`` of the KL, ``moves`` (the largest of a likely token's logprob),
``flip_margin`` (the largest margin at which the likeliest token changed), ``positions``."""


def ways(session: Session, num_cases: int) -> Iterator[Way]:
    """The ways in which a plan can be run otherwise, the plan's own again the first."""
    plan = session.plan
    yield Way(name="run again")
    yield Way(name="batch size 1", batch=1)
    rows = min(32, plan.max_running_requests)
    if rows > num_cases:
        yield Way(name=f"batch size {rows}", batch=rows, copies=-(-rows // num_cases))
    if plan.value("graph"):
        yield Way(name="eager instead of graphs", settings={"graph": False})
    if plan.value("radix_cache"):
        yield Way(name="nothing cached", settings={"radix_cache": False})
    if plan.overlap:
        yield Way(name="no overlap", settings={"overlap": False})
    page = plan.page_size
    for chunk in dict.fromkeys(max(-(-size // page) * page, page) for size in (16, 64)):
        yield Way(name=f"chunks of {chunk}", settings={"chunked_prefill_size": chunk})
    yield Way(name="whole prompts", settings={"chunked_prefill_size": -1})


def spread(base: Sequence[Scores], other: Sequence[Scores]) -> dict[str, float]:
    """What lies between two runs of the same sequences."""
    pairs = list(zip(base, other, strict=True))
    values = np.concatenate([kl(p, q) for p, q in pairs])
    moves = np.concatenate([logprob_moves(p, q) for p, q in pairs])
    flipped = np.concatenate([~agreement(p, q) for p, q in pairs])
    gaps = np.concatenate([margins(p) for p, _ in pairs])
    return {
        "mean": float(values.mean()),
        "p99": float(np.quantile(values, 0.99)),
        "max": float(values.max()),
        "moves": float(moves.max()),
        "flip_margin": float(gaps[flipped].max(initial=0.0)),
        "positions": float(len(values)),
    }


def noise_floor(
    session: Session,
    cases: Sequence[Case],
    top: int,
    progress: Progress | None = None,
    positions: int = POSITIONS,
) -> dict[str, dict[str, float]]:
    """What each way moves, on sequences that are shortened to so many positions together."""
    cases = limited(cases, positions)
    with session.run() as run:
        base = run.score(cases, top)
    found: dict[str, dict[str, float]] = {}
    all_ways = list(ways(session, len(cases)))
    shows = watch(session.prepared.loaded, lambda call: None) is not None
    total = len(all_ways) + len(ROUNDING_SEEDS) * shows
    for done, way in enumerate(all_ways):
        _tell(progress, done, total)
        with session.run(way) as run:
            found[way.name] = spread(base, run.score(cases, top))
    if shows:
        for done, seed in enumerate(ROUNDING_SEEDS, len(all_ways)):
            _tell(progress, done, total)
            with session.run(Way(name="rounding"), Pusher(session.plan.dtype, seed)) as run:
                found[f"rounding of {session.plan.dtype}, seed {seed}"] = spread(base, run.score(cases, top))
    _tell(progress, total, total)
    return found


def _tell(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress("noise floor", done, total)


def worst(noise: Mapping[str, Spread]) -> dict[str, float]:
    """The largest of each number over all ways; zeros where none was measured."""
    return {name: max((spread[name] for spread in noise.values()), default=0.0) for name in NOISE_NUMBERS}
