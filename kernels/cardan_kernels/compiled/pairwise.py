"""Which variants are compiled in each change: few, so that most pairs of values of two features are among them.

It compiles nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cardan_kernels.compiled.variant import Variant


@dataclass(frozen=True, slots=True)
class Selection:
    """What is compiled.

    Attributes:
        chosen: chip and name of each variant.
        pairs: how many pairs of values of two features there are.
        covered: how many of them are among the chosen ones.
    """

    chosen: tuple[tuple[str, str], ...]
    pairs: int
    covered: int


def select(variants: Mapping[str, Sequence[Variant]], most: int) -> Selection:
    """At most ``most`` variants, each operation on each chip at least once.

    Chips are no feature: what differs between them is compiled once each, and pairs of features on any of them.

    Args:
        variants: of each chip.
        most: variants.
    """
    by_op: dict[str, list[tuple[str, Variant]]] = {}
    for chip, found in variants.items():
        for variant in found:
            by_op.setdefault(variant.op, []).append((chip, variant))
    chosen: list[tuple[int, str, str]] = []
    pairs = 0
    for candidates in by_op.values():
        picked, found_pairs = _of_op(candidates)
        chosen += picked
        pairs += found_pairs
    # what adds least is left out first; a chip's first variant of an operation adds more than any number of pairs
    kept = sorted(chosen, key=lambda entry: -entry[0])[:most]
    return Selection(
        tuple((chip, name) for _, chip, name in sorted(kept, key=lambda entry: entry[1:])),
        pairs,
        sum(gain % FIRST for gain, _, _ in kept),
    )


FIRST = 1 << 20
"""Worth of the first variant of an operation on a chip, in pairs."""


def _of_op(candidates: Sequence[tuple[str, Variant]]) -> tuple[list[tuple[int, str, str]], int]:
    """The chosen ones of an operation, each with what it adds, and how many pairs the operation has."""
    features = {variant.name: _pairs(variant) for _, variant in candidates}
    entries = [(chip, variant.name) for chip, variant in candidates]
    open_pairs = set().union(*features.values())
    open_chips = {chip for chip, _ in entries}
    total = len(open_pairs)
    seen: set[tuple[str, object]] = set()
    chosen = []
    while open_pairs or open_chips:
        gains = {name: len(pairs & open_pairs) for name, pairs in features.items()}
        worth = [gains[name] + FIRST * (chip in open_chips) for chip, name in entries]
        most = max(worth)
        # of equal ones that whose chip has compiled fewest of its values
        chip, name = max(
            (entry for entry, value in zip(entries, worth, strict=True) if value == most),
            key=lambda entry: sum((entry[0], value) not in seen for value in _values(features[entry[1]])),
        )
        chosen.append((most, chip, name))
        open_pairs -= features[name]
        open_chips.discard(chip)
        seen |= {(chip, value) for value in _values(features[name])}
    return chosen, total


def _pairs(variant: Variant) -> frozenset[object]:
    """Pairs of its features' values; of a variant with one feature the value itself."""
    values = tuple(variant.features.items())
    pairs: Iterable[object] = itertools.combinations(values, 2) if len(values) > 1 else values or ((variant.op,),)
    return frozenset(pairs)


def _values(pairs: Iterable[object]) -> set[object]:
    return {value for pair in pairs for value in (pair if isinstance(pair, tuple) else (pair,))}
