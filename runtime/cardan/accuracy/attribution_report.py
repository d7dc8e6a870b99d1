"""What attribution found: which feature carries a difference, and where in the model it begins.

It knows no engine; ``attribution`` looks for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LAYER = re.compile(r"^layers\.(\d+)\.")


def layer_of(key: str) -> int | None:
    """The layer that a parameter or a result belongs to; None for those outside of layers."""
    found = _LAYER.match(key)
    return None if found is None else int(found.group(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """A call whose result is not what its inputs and weights give.

    Attributes:
        op: the operation; ``attend`` and ``rope`` stand for attention and rotation.
        group: what it belongs to, see ``references.GROUPS``.
        key: the parameter that it uses, or that was used last.
        layer: the layer; None outside of layers.
        error: relative, of the worst feature.
        allowed: what rounding explains.
    """

    op: str
    group: str
    key: str
    layer: int | None
    error: float
    allowed: float

    def describe(self) -> str:
        """As part of a sentence."""
        where = "" if self.layer is None else f" in layer {self.layer}"
        own = f" over {self.key}" if self.group in ("linears", "norms", "embedding") else ""
        return f"{self.op}{own}{where}: relative error {self.error:.2g}, of which rounding explains {self.allowed:.2g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One feature that was turned off, or a group of operations that was computed by its reference.

    Attributes:
        feature: its name.
        how: what ran instead.
        kl_mean: what was left of the KL from the record, in nats.
        kl_max: the largest of all positions.
        gone: whether that is within the noise floor.
        note: why it could not be tried; empty where it was.
    """

    feature: str
    how: str
    kl_mean: float = 0.0
    kl_max: float = 0.0
    gone: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tap:
    """The first fingerprinted result that is farther from the record's than rounding moves it.

    Attributes:
        name: of the norm that gave it.
        layer: it belongs to; None for the last norm.
        error: relative.
        floor: what rounding moves it by.
    """

    name: str
    layer: int | None
    error: float
    floor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """What carries a difference.

    Attributes:
        feature: that carries it; empty where none does alone.
        layer: where it begins; None where that is outside of layers or not known.
        statements: what was found, most important first.
        kl_mean: KL as configured, on the positions that were tried.
        positions: how many these are.
        trials: one by one.
        operations: calls that were held to their references.
        deviations: those that left the band, in the order of the calls; the first ones.
        tap: first result beyond noise, where both sides have fingerprints of layers.
    """

    feature: str
    layer: int | None
    statements: tuple[str, ...]
    kl_mean: float
    positions: int
    trials: tuple[Trial, ...] = ()
    operations: int = 0
    deviations: tuple[Deviation, ...] = ()
    tap: Tap | None = None
