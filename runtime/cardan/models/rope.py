"""Rotary position embeddings: reads them from a config in every spelling and makes the tables of cosines and sines.

It knows no device: tables are numpy, computed in float64 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from cardan.models.fields import ConfigFields
from cardan.platform import RopeTable

Float64Array: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RopeBase:
    """What every kind of RoPE starts from.

    Attributes:
        theta: base of the wavelengths.
        rotary_dim: how many leading features of a head are rotated.
    """

    theta: float
    rotary_dim: int

    def frequencies(self, theta: float | None = None) -> Float64Array:
        """Radians per position of each pair, ``[rotary_dim / 2]``. Source: RoFormer, equation 15."""
        exponents = np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim
        result: Float64Array = (theta or self.theta) ** -exponents
        return result


class RopeScaling(Protocol):
    """How a model stretches its frequencies to longer contexts."""

    def scale(self, base: RopeBase, context_length: int) -> tuple[Float64Array, float]:
        """Frequencies ``[rotary_dim / 2]``, and the factor on cosines and sines."""


@dataclass(frozen=True, slots=True)
class NoScaling:
    """Frequencies as they are."""

    def scale(self, base: RopeBase, context_length: int) -> tuple[Float64Array, float]:
        """See ``RopeScaling``."""
        return base.frequencies(), 1.0


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation. Source: Chen et al. 2023, "Extending context window …", equation 4."""

    factor: float

    def scale(self, base: RopeBase, context_length: int) -> tuple[Float64Array, float]:
        """See ``RopeScaling``."""
        return base.frequencies() / self.factor, 1.0


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """NTK-aware change of base, fixed by the context length that is served.

    Source: Peng et al. 2023, "YaRN", equations 6 to 8 and section 3.3.
    """

    factor: float
    original_length: int

    def scale(self, base: RopeBase, context_length: int) -> tuple[Float64Array, float]:
        """See ``RopeScaling``."""
        length = max(context_length, self.original_length)
        stretch = self.factor * length / self.original_length - (self.factor - 1.0)
        power = base.rotary_dim / (base.rotary_dim - 2)
        return base.frequencies(base.theta * stretch**power), 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Long waves are stretched, short ones kept, those between blended.

    Source: Llama 3.1's model card and reference code, ``apply_scaling``.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def scale(self, base: RopeBase, context_length: int) -> tuple[Float64Array, float]:
        """See ``RopeScaling``."""
        plain = base.frequencies()
        turns = self.original_length * plain / (2.0 * math.pi)
        keep = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return plain * (keep + (1.0 - keep) / self.factor), 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Interpolation by parts. Source: Peng et al. 2023, "YaRN", section 3.2 and equation 22."""

    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    original_length: int
    truncate: bool

    def scale(self, base: RopeBase, context_length: int) -> tuple[Float64Array, float]:
        """See ``RopeScaling``."""
        first, last = (self._pair_with_turns(base, turns) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0.0), min(last, base.rotary_dim - 1.0)
        width = (last - first) or 0.001
        stretched = np.clip((np.arange(base.rotary_dim // 2) - first) / width, 0.0, 1.0)
        plain = base.frequencies()
        return plain * (1.0 - stretched + stretched / self.factor), self.attention_factor

    def _pair_with_turns(self, base: RopeBase, turns: float) -> float:
        """Index (a real number) of the pair that turns so often within the original length."""
        return base.rotary_dim * math.log(self.original_length / (turns * 2.0 * math.pi)) / (2.0 * math.log(base.theta))


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """A divisor for each pair, of two sets, fixed by the context length that is served.

    Source: Ding et al. 2024, "LongRoPE", equation 3; the attention factor is Phi-3's.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    attention_factor: float
    original_length: int

    def scale(self, base: RopeBase, context_length: int) -> tuple[Float64Array, float]:
        """See ``RopeScaling``."""
        factors = self.long_factors if context_length > self.original_length else self.short_factors
        return base.frequencies() / np.asarray(factors), self.attention_factor


@dataclass(frozen=True, slots=True)
class ExplicitScaling:
    """A divisor for each pair, as the checkpoint lists them."""

    factors: tuple[float, ...]

    def scale(self, base: RopeBase, context_length: int) -> tuple[Float64Array, float]:
        """See ``RopeScaling``."""
        return base.frequencies() / np.asarray(self.factors), 1.0


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary embedding of a model."""

    base: RopeBase
    scaling: RopeScaling

    @property
    def stretched_length(self) -> int:
        """Longest sequence after the stretch, 0 where ``max_position_embeddings`` says it already."""
        scaling = self.scaling
        return int(scaling.factor * scaling.original_length) if isinstance(scaling, YarnScaling) else 0

    def table(self, context_length: int) -> RopeTable:
        """Cosines and sines for positions ``0 .. context_length``."""
        frequencies, factor = self.scaling.scale(self.base, context_length)
        angles = np.arange(context_length, dtype=np.float64)[:, None] * frequencies
        return RopeTable(
            cos=(np.cos(angles) * factor).astype(np.float32), sin=(np.sin(angles) * factor).astype(np.float32)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeReader:
    """Reads RoPE from a config, spelled ``rope_theta`` and ``rope_scaling`` or, newer, ``rope_parameters``.

    Attributes:
        fields: the whole config.
        head_dim: width of a head.
        context_length: ``max_position_embeddings``.
    """

    fields: ConfigFields
    head_dim: int
    context_length: int

    def read(
        self,
        layer_type: str | None = None,
        *,
        theta: float = 10000.0,
        theta_key: str = "rope_theta",
        scaled: bool = True,
    ) -> Rope:
        """The RoPE of the layers of one type.

        Args:
            layer_type: name under which newer configs nest it; None where all layers share one.
            theta: base where the config has none.
            theta_key: the old spelling's field for the base.
            scaled: whether the old spelling's ``rope_scaling`` and explicit factors apply.

        Raises:
            ModelConfigError: a field is missing or wrong.
        """
        group = self._newer_group(layer_type)
        if group is None and scaled:
            group = self.fields.fields("rope_scaling")
        group = group or ConfigFields({})
        share = group if group.has("partial_rotary_factor") else self.fields
        rotary_dim = int(self.head_dim * share.number("partial_rotary_factor", 1.0) + 1e-6)
        if rotary_dim % 2 or not 0 < rotary_dim <= self.head_dim:
            share.refuse("partial_rotary_factor", f"a part of head_dim = {self.head_dim} that is an even number")
        base_theta = group.number("rope_theta", self.fields.number(theta_key, theta))
        base = RopeBase(base_theta, rotary_dim)
        if scaled and self.fields.has("cardan_rope_factors"):
            return Rope(base, ExplicitScaling(self.fields.numbers("cardan_rope_factors", rotary_dim // 2)))
        return Rope(base, self._scaling(group, rotary_dim // 2))

    def _newer_group(self, layer_type: str | None) -> ConfigFields | None:
        """The ``rope_parameters`` of a layer type, whether nested or not."""
        group = self.fields.fields("rope_parameters")
        if group is None:
            return None
        return (group.fields(layer_type or "full_attention")) or group

    def _scaling(self, group: ConfigFields, num_pairs: int) -> RopeScaling:
        key = "rope_type" if group.has("rope_type") else "type"
        read: ScalingReader = group.choice(key, SCALINGS, "default")
        return read(ScalingFields(group, num_pairs, self.context_length, self._original_length(group)))

    def _original_length(self, group: ConfigFields) -> int:
        """Phi-3 keeps it beside the group, the others inside."""
        key = "original_max_position_embeddings"
        return (self.fields if self.fields.has(key) else group).integer(key, self.context_length)


@dataclass(frozen=True, slots=True)
class ScalingFields:
    """What the reader of one kind of scaling looks at."""

    group: ConfigFields
    num_pairs: int
    context_length: int
    original_length: int


def _read_none(fields: ScalingFields) -> RopeScaling:
    return NoScaling()


def _read_linear(fields: ScalingFields) -> RopeScaling:
    return LinearScaling(fields.group.number("factor"))


def _read_dynamic(fields: ScalingFields) -> RopeScaling:
    if fields.num_pairs < 2:
        fields.group.refuse("rope_type", "another kind, because 'dynamic' needs more than one rotated pair")
    return DynamicScaling(fields.group.number("factor"), fields.context_length)


def _read_llama3(fields: ScalingFields) -> RopeScaling:
    low, high = fields.group.number("low_freq_factor"), fields.group.number("high_freq_factor")
    if high <= low:
        fields.group.refuse("high_freq_factor", f"a number above low_freq_factor = {low:g}")
    return Llama3Scaling(
        factor=fields.group.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_length=fields.original_length,
    )


def _read_yarn(fields: ScalingFields) -> RopeScaling:
    group = fields.group
    factor = group.number("factor", fields.context_length / fields.original_length)
    return YarnScaling(
        factor=factor,
        attention_factor=group.number("attention_factor", _yarn_attention_factor(group, factor)),
        beta_fast=group.number("beta_fast", 32.0),
        beta_slow=group.number("beta_slow", 1.0),
        original_length=fields.original_length,
        truncate=group.boolean("truncate", True),
    )


def _yarn_attention_factor(group: ConfigFields, factor: float) -> float:
    """``0.1 ln(factor) + 1``, or a ratio of two such terms where the config has ``mscale`` and ``mscale_all_dim``."""

    def term(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    above, below = (group.number(key, 0.0, above=-1.0) for key in ("mscale", "mscale_all_dim"))
    return term(above) / term(below) if above and below else term(1.0)


def _read_longrope(fields: ScalingFields) -> RopeScaling:
    group, original = fields.group, fields.original_length
    factor = group.number("factor", fields.context_length / original)
    natural = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    return LongRopeScaling(
        short_factors=group.numbers("short_factor", fields.num_pairs),
        long_factors=group.numbers("long_factor", fields.num_pairs),
        attention_factor=group.number("attention_factor", natural),
        original_length=original,
    )


ScalingReader: TypeAlias = Callable[[ScalingFields], RopeScaling]

SCALINGS: dict[str, ScalingReader] = {
    "default": _read_none,
    "linear": _read_linear,
    "dynamic": _read_dynamic,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
    "su": _read_longrope,
}
"""Readers of the kinds of scaling; ``su`` is Phi-3's first name for ``longrope``."""
