"""The platform interface: what a plugin's entry point gives.

It knows no platform by name. Probing must not initialise a device.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cardan.platform.capabilities import Capabilities
from cardan.platform.device import Device, DeviceInfo
from cardan.platform.model import ModelFacts
from cardan.platform.ops_device import OpsDevice
from cardan.platform.tuning import Tuner

PLATFORM_API = 1
"""Version of everything exported by ``cardan.platform`` and ``cardan.ops``."""

OLDEST_PLATFORM_API = 1
"""Oldest version whose plugins still run, with a warning: the one before ``PLATFORM_API``, but for the first."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a platform can run here.

    Attributes:
        score: 0 means never chosen by ``auto``; otherwise the highest wins.
        reason: why it can, or what is missing.
        usable: whether it can run when asked for by name.
        proven: where it cannot run, what was proven of it without its hardware, for who wanted to try it.
    """

    score: int
    reason: str
    usable: bool = True
    proven: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """A flag of the platform's own, given as ``--platform-option name=value``.

    Attributes:
        name: of the option.
        kind: ``int``, ``float``, ``bool`` or ``str``; the text is parsed to it.
        default: value when it is not given.
        help: one line.
        choices: allowed values, empty for any.
    """

    name: str
    kind: type
    default: Any
    help: str
    choices: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A value that a platform recommends for a neutral setting, with the reason."""

    value: Any
    why: str


class Platform(abc.ABC):
    """One kind of hardware."""

    name: str
    api_range: tuple[int, int] = (1, 1)
    """Oldest and newest ``PLATFORM_API`` that the plugin works with."""
    reads_weights: bool = True
    """False when ``Device.load`` reads no tensor, so that a folder without weights can be served."""

    @abc.abstractmethod
    def probe(self) -> Availability:
        """Say whether the platform can run here, without touching a device."""

    @abc.abstractmethod
    def devices(self) -> tuple[DeviceInfo, ...]:
        """The devices of this machine."""

    @abc.abstractmethod
    def capabilities(self, device: DeviceInfo) -> Capabilities:
        """What works on a device."""

    def options(self) -> tuple[OptionSpec, ...]:
        """The platform's own flags."""
        return ()

    def configured(self, options: Mapping[str, Any]) -> Platform:
        """The platform with a value for each of ``options()``, where its answers depend on them; else itself.

        Capabilities, recommendations and the description of devices are asked of what this returns.
        """
        return self

    def recommend(self, facts: ModelFacts, device: DeviceInfo) -> Mapping[str, Recommendation]:
        """Values for neutral settings, such as ``chunked_prefill_size``, ``page_size`` and ``dtype``."""
        return {}

    def tuner(self, device: DeviceInfo) -> Tuner | None:
        """What of the kernels ``cardan tune`` can measure on a device; None where nothing can be tuned."""
        return None

    def tuned(self, numbers: Mapping[str, int]) -> Platform:
        """The platform whose devices choose by numbers that were measured, by name; those not given keep their default.

        It is called with numbers that ``tuner`` has, within their bounds, and only where there is a tuner.
        """
        return self

    @abc.abstractmethod
    def open(self, device: DeviceInfo, options: Mapping[str, Any]) -> Device | OpsDevice:
        """Open a device; ``options`` holds a value for each of ``options()``."""
