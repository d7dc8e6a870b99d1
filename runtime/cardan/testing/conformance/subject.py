"""The platform under test: loaded, asked for what it can do, and its device opened when a check first needs it.

It knows no check.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from cardan.config import EngineConfig
from cardan.ops.opspec import ROUNDOFF
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
        memo: what checks of one part share, such as answers of a run that several look at.
    """

    def __init__(self, platform: Platform, *, quick: bool = False, options: tuple[str, ...] = ()) -> None:
        self.platform = platform
        self.quick = quick
        self.info: DeviceInfo = platform.devices()[0]
        self.capabilities: Capabilities = platform.capabilities(self.info)
        self.options: Mapping[str, Any] = parse_options(options, platform.options(), platform.name)
        self.option_texts = options
        self.memo: dict[str, Any] = {}
        self._device: Device | None = None
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
    def ops_device(self) -> OpsDevice | None:
        """What a level-2 platform supplied, or None for a device of level 1."""
        device = self.device
        return device.device if isinstance(device, NeutralDevice) else None

    @property
    def ops(self) -> OpsDevice:
        """The level-2 device.

        Raises:
            NotApplicableError: the device is of level 1.
        """
        found = self.ops_device
        if found is None:
            raise NotApplicableError("the device implements level 1 itself and shows no ops table")
        return found

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
        claimed = self.dtypes("kv_dtype")
        return self.best_dtype if self.best_dtype in claimed or not claimed else claimed[0]

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
