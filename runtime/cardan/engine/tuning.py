"""Measures what a platform lets be tuned and keeps it for later starts; the only place where that happens.

It knows no kernel: the platform's ``Tuner`` measures.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cardan.config import EngineConfig, cache_dir
from cardan.engine.preparation import open_and_resolve
from cardan.errors import PlatformApiError, UnsupportedError
from cardan.platform import (
    DeviceInfo,
    LinearSpec,
    ParameterKind,
    Platform,
    Tunable,
    TunedLinear,
    Tuner,
)
from cardan.platform.discovery import choose_platform
from cardan.platform.refusals import parse_options
from cardan.platform.tuned_tables import TuningTable, find_table, write_table
from cardan.weights import OpenedCheckpoint

Progress = Callable[[str, int, int], None]
"""Called with what is done, how much of it is, and how much there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedNumbers:
    """What tuning found.

    Attributes:
        path: where the table is kept.
        table: with every number, those of earlier measurements included.
        tunables: what can be tuned, by name.
        measured: names of the numbers that were measured now.
    """

    path: Path
    table: TuningTable
    tunables: Mapping[str, Tunable]
    measured: tuple[str, ...]


def tune(config: EngineConfig, progress: Progress, *, with_model: bool) -> TunedNumbers:
    """Measure on the platform of a config, and keep the table.

    Args:
        config: the platform and its options, and the model.
        progress: told how far it is.
        with_model: measure what the linears of the model need, with their sizes; else everything, with sizes that the
            platform chooses. Numbers that were measured before, and are not now, are kept.

    Raises:
        UnsupportedError: the platform offers nothing to tune, or nothing for this model.
        CardanError: the platform or the model is refused, or the table cannot be kept.
    """
    asked = config.platform
    platform = choose_platform(asked.platform, options=asked.options)
    platform = platform.configured(parse_options(asked.options, platform.options(), platform.name))
    tuner = _tuner(platform, platform.devices()[0])
    linears = _linears(config, progress) if with_model else ()
    measured = {name: _whole(value) for name, value in tuner.measure(linears, progress).items()}
    if not measured:
        raise UnsupportedError(
            f"Platform {platform.name!r} measured nothing: there is no choice of kernels for the weights of model "
            f"{config.model.model!r}. Leave --model out to tune for others."
            if with_model
            else f"Platform {platform.name!r} measured nothing. Tell the plugin's maker."
        )
    tunables = {tunable.name: tunable for tunable in tuner.tunables()}
    _check(platform.name, measured, tunables)
    cache = cache_dir()
    before, _ = find_table(platform.name, tuner, cache)
    table = TuningTable(
        platform=platform.name,
        processor=tuner.processor,
        kernels=tuner.kernels,
        date=datetime.datetime.now().astimezone().date().isoformat(),
        numbers={**(before.numbers if before is not None else {}), **measured},
    )
    path = write_table(table, cache)
    return TunedNumbers(path=path, table=table, tunables=tunables, measured=tuple(sorted(measured)))


def _tuner(platform: Platform, device: DeviceInfo) -> Tuner:
    tuner = platform.tuner(device)
    if tuner is None:
        raise UnsupportedError(
            f"Platform {platform.name!r} offers nothing to tune on {device.name}: its kernels choose by themselves. "
            "There is nothing to do."
        )
    return tuner


def _whole(value: Any) -> Any:
    """A whole number of numpy's as one of Python's, which tables hold; anything else as it is."""
    return int(value) if isinstance(value, np.integer) else value


def _check(name: str, measured: Mapping[str, int], tunables: Mapping[str, Tunable]) -> None:
    """Refuse results that later starts would refuse."""
    for number, value in measured.items():
        known = tunables.get(number)
        if known is None or type(value) is not int or not known.least <= value <= known.most:
            expected = "names of its tunables" if known is None else f"a whole number of {known.least} to {known.most}"
            raise PlatformApiError(
                f"Platform {name!r} measured {value!r} for {number!r}, expected {expected}. Tell the plugin's maker."
            )


def _linears(config: EngineConfig, progress: Progress) -> tuple[TunedLinear, ...]:
    """Every linear of the model, in the format of its tensors."""
    opened = open_and_resolve(config, progress)
    try:
        parameters = {parameter.name: parameter for parameter in opened.model.parameters()}
        formats = _formats(opened.checkpoint)
        linears = []
        for parameter in parameters.values():
            if parameter.kind is not ParameterKind.LINEAR:
                continue
            sources = (parameters[parameter.tied_to] if parameter.tied_to else parameter).sources
            spec = LinearSpec(
                name=parameter.name,
                out_features=parameter.shape[0],
                in_features=parameter.shape[1],
                dtype=opened.plan.dtype,
            )
            kinds = {formats[source.tensor] for source in sources if source.tensor in formats}
            linears += [TunedLinear(fmt, spec) for fmt in sorted(kinds)]
    finally:
        opened.checkpoint.close()
    if not linears:
        raise UnsupportedError(
            f"Model {config.model.model!r} has no linears to measure with. Leave --model out, or pass another."
        )
    return tuple(linears)


def _formats(checkpoint: OpenedCheckpoint) -> dict[str, str]:
    return {name: str(dtype) for name, (dtype, _) in checkpoint.tensor_info().items()}
