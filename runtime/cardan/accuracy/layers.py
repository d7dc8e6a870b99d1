"""Fingerprints of layers: norms and seeded random projections of what the norms between blocks give.

They know no platform. Results of norms are looked at because every platform has them, however it fuses what is before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cardan.accuracy.cases import Case
from cardan.accuracy.golden import LayerPrints
from cardan.accuracy.session import Session, Way
from cardan.accuracy.watching import Call, Listener
from cardan.types import Float32Array

PROJECTIONS = 4
SEED = 20260101
NORMS = ("rms_norm", "layer_norm", "add_rms_norm")
BYTES_PER_POSITION = 320
"""What fingerprints may take for each scored position; of deep models fewer positions have some."""
ONE_BY_ONE = Way(name="one by one, nothing cached", batch=1, settings={"radix_cache": False})


def is_tap(call: Call) -> bool:
    """Whether a call's result is looked at: norms of the residual stream, not those within attention."""
    return call.op in NORMS and not call.key.endswith(("q_norm", "k_norm"))


def result_of(call: Call) -> Float32Array:
    """The tapped result on the host, float32 ``[tokens, width]``."""
    result = call.result[0] if call.op == "add_rms_norm" else call.result
    return np.asarray(call.ops.to_host(result), dtype=np.float32)


def projector(tap: str, width: int, seed: int = SEED) -> Float32Array:
    """A matrix of signs ``[width, PROJECTIONS]`` that only the tap's name and the seed decide.

    The mean square of a vector's projections estimates its squared norm.
    """
    key = hashlib.sha256(f"{seed}:{tap}:{width}".encode()).digest()
    signs = np.random.Generator(np.random.Philox(int.from_bytes(key[:8], "little"))).integers(
        0, 2, (width, PROJECTIONS)
    )
    return (2 * signs - 1).astype(np.float32)


@dataclass(slots=True)
class Collector:
    """Listens to a model that runs one sequence at a time.

    Attributes:
        before: a listener that sees each call first, and whose results are taken.
        results: tapped results by name, in pieces as steps gave them.
    """

    before: Listener | None = None
    results: dict[str, list[Float32Array]] = field(default_factory=dict)

    def __call__(self, call: Call) -> Any:
        """Take a result."""
        other = None if self.before is None else self.before(call)
        if is_tap(call):
            seen = call if other is None else replace(call, result=other)
            self.results.setdefault(call.key, []).append(result_of(seen))
        return other

    def take(self) -> dict[str, Float32Array]:
        """Whole results ``[tokens, width]`` since the last call."""
        found = {tap: np.concatenate(pieces) for tap, pieces in self.results.items()}
        self.results.clear()
        return found


def layer_results(
    session: Session, cases: Sequence[Case], before: Listener | None = None
) -> list[dict[str, Float32Array]]:
    """What every tap gave along each sequence, ``[tokens, width]`` float32; the last token runs through no layer.

    Args:
        session: that runs.
        cases: the sequences.
        before: a listener that sees each call first, and may change its result.

    Raises:
        UnsupportedError: the device shows nothing of its models.
    """
    collector = Collector(before)
    found = []
    with session.run(ONE_BY_ONE, collector) as run:
        for case in cases:
            run.score([case.without_sharing()], 1)
            found.append(collector.take())
    return found


def prints_of(results: Sequence[dict[str, Float32Array]], num_positions: int) -> LayerPrints:
    """Fingerprints of results, at as many evenly spaced positions as the file has room for."""
    taps = tuple(results[0])
    size = len(taps) * 4 * (1 + PROJECTIONS)
    most = max(len(results), num_positions * BYTES_PER_POSITION // size)
    counts = [len(next(iter(result.values()))) for result in results]
    stride = max(1, -(-sum(counts) // most))
    cases, positions, norms, projections = [], [], [], []
    for index, result in enumerate(results):
        at = np.arange(counts[index] - 1, -1, -stride)[::-1]
        cases.append(np.full(len(at), index, np.int32))
        positions.append(at.astype(np.int32))
        chosen = {tap: result[tap][at] for tap in taps}
        norms.append(np.stack([np.linalg.norm(chosen[tap], axis=1) for tap in taps], axis=1))
        projections.append(np.stack([chosen[tap] @ projector(tap, chosen[tap].shape[1]) for tap in taps], axis=1))
    return LayerPrints(
        taps=taps,
        cases=np.concatenate(cases),
        positions=np.concatenate(positions),
        norms=np.concatenate(norms).astype(np.float32),
        projections=np.concatenate(projections).astype(np.float32),
        seed=SEED,
    )


def moved(a: Sequence[dict[str, Float32Array]], b: Sequence[dict[str, Float32Array]]) -> dict[str, float]:
    """Relative error of each tap between whole results of the same sequences."""
    found = {}
    for tap in a[0]:
        ours, theirs = (np.concatenate([result[tap] for result in side]).astype(np.float64) for side in (a, b))
        found[tap] = float(np.sqrt(((ours - theirs) ** 2).mean() / max((ours**2).mean(), 1e-30)))
    return found


def layer_errors(a: LayerPrints, b: LayerPrints) -> dict[str, float]:
    """Estimated relative error of each tap that both have, in order: root mean square over common positions.

    The mean square of differences of random projections estimates that of the whole difference.

    Raises:
        ValueError: the projections were made from different seeds.
    """
    if a.seed != b.seed:
        raise ValueError(f"projections of seeds {a.seed} and {b.seed} cannot be compared")
    places = {key: row for row, key in enumerate(zip(b.cases.tolist(), b.positions.tolist(), strict=True))}
    pairs = [
        (row, places[key])
        for row, key in enumerate(zip(a.cases.tolist(), a.positions.tolist(), strict=True))
        if key in places
    ]
    if not pairs:
        return {}
    rows, others = (np.asarray(side) for side in zip(*pairs, strict=True))
    found = {}
    for column, tap in enumerate(a.taps):
        if tap not in b.taps:
            continue
        other = b.taps.index(tap)
        moved = (a.projections[rows, column] - b.projections[others, other]).astype(np.float64)
        size = a.norms[rows, column].astype(np.float64)
        found[tap] = float(np.sqrt((moved**2).mean() / np.maximum((size**2).mean(), 1e-30)))
    return found
