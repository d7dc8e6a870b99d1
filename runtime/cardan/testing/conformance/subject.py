"""The platform under test: loaded, asked for what it can do, and its device opened when a check first needs it.

It knows no check.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from cardan.config import EngineConfig, PlatformConfig
from cardan.ops.rounding import ROUNDOFF
from cardan.platform import Capabilities, Device, DeviceInfo, ModelFacts, OpsDevice, Plan, Platform
from cardan.platform.refusals import parse_options
from cardan.platform.resolve import platform_facts, resolve
from cardan.runner import NeutralDevice, open_device
from cardan.testing.conformance.check import NotApplicableError


class Subject:
    """One device of one platform.

    Attributes:
        platform: under test.
        info: its first device.
        capabilities: what it says of itself.
        quick: whether long lengths and rare shapes are left out.
        memo: what checks make once and share, such as tiny checkpoints and the first answers to a prompt.
    """

    def __init__(self, platform: Platform, *, quick: bool = False, options: tuple[str, ...] = ()) -> None:
        self.options: Mapping[str, Any] = parse_options(options, platform.options(), platform.name)
        self.platform = platform.configured(self.options)
        self.quick = quick
        self.info: DeviceInfo = self.platform.devices()[0]
        self.capabilities: Capabilities = self.platform.capabilities(self.info)
        self.option_texts = options
        self.memo: dict[str, Any] = {}
        self._device: Device | None = None
        self._level: int | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Subject:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def device(self) -> Device:
        """The open device; one that supplies ops only is completed by the neutral runner."""
        if self._device is None:
            self._device = open_device(self.platform, self.info, self.options)
        return self._device

    @property
    def level(self) -> int:
        """Whether the device supplies ops (2) or does everything itself (1); it is opened to see."""
        if self._level is None:
            self._level = 2 if isinstance(self.device, NeutralDevice) else 1
        return self._level

    @property
    def ops(self) -> OpsDevice:
        """The level-2 device.

        Raises:
            NotApplicableError: the device is of level 1.
        """
        self.needs_ops()
        device = self.device
        assert isinstance(device, NeutralDevice)
        return device.device

    def needs_ops(self) -> None:
        """Leave a check that needs an ops table on a device of level 1.

        Raises:
            NotApplicableError: the device is of level 1.
        """
        if self.level == 1:
            raise NotApplicableError("the device implements level 1 itself and shows no ops table")

    def needs(self, *features: str) -> None:
        """Leave a check that needs features of which the platform lacks one.

        Raises:
            NotApplicableError: with the platform's own reason.
        """
        for feature in features:
            if not self.capabilities.supports(feature):
                raise NotApplicableError(f"{feature} is not supported: {self.capabilities.get(feature).reason}")

    @property
    def folder(self) -> Path:
        """A folder for checkpoints; it goes with the subject."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="cardan-conformance-")
        return Path(self._folder.name)

    def dtypes(self, family: str = "dtype") -> tuple[str, ...]:
        """Claimed types of a family that the references can round to, float32 first."""
        claimed = [name for name in self.capabilities.family(family) if name in ROUNDOFF]
        return tuple(sorted(claimed, key=lambda name: (name != "float32", claimed.index(name))))

    @property
    def best_dtype(self) -> str:
        """The claimed type in which results are compared most closely.

        Raises:
            NotApplicableError: none is claimed that the references know.
        """
        found = self.dtypes()
        if not found:
            raise NotApplicableError("the platform claims no activation type that the references know")
        return found[0]

    @property
    def best_kv_dtype(self) -> str:
        """The KV type that fits ``best_dtype``."""
        return self.kv_dtype_for(self.best_dtype)

    def kv_dtype_for(self, dtype: str) -> str:
        """The KV type that fits a type of activations: the same where it is claimed."""
        claimed = self.dtypes("kv_dtype")
        return dtype if dtype in claimed or not claimed else claimed[0]

    def platform_config(self, dtype: str, *, graph: bool = False) -> PlatformConfig:
        """What a config says of the platform for engines that compute in ``dtype``."""
        return PlatformConfig(
            platform=self.platform.name,
            kv_cache_dtype=self.kv_dtype_for(dtype),
            disable_graph=not graph,
            options=self.option_texts,
        )

    def plan(self, facts: ModelFacts, config: EngineConfig) -> Plan:
        """The plan of a config for a model on this platform."""
        return resolve(config, facts, platform_facts(self.platform, self.info, facts))

    def release(self) -> None:
        """Close the device, so that an engine can open it; the next check opens it again."""
        if self._device is not None:
            self._device.close()
            self._device = None

    def close(self) -> None:
        """Give everything back."""
        self.release()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
