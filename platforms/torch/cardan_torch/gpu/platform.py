"""What GPU platforms share of probing, opening and describing devices; a vendor's platform derives from it.

It imports torch only where a device is asked for, so that listing platforms stays cheap.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cardan.errors import UnsupportedError
from cardan.platform import (
    Availability,
    Capabilities,
    Capability,
    DeviceInfo,
    ModelFacts,
    OpsDevice,
    OptionSpec,
    Platform,
    Recommendation,
)
from cardan_torch.gpu.features import PAGE_SIZES, proof, unsupported
from cardan_torch.gpu.memory import GPU_MEMORY
from cardan_torch.gpu.presence import Vendor, lacking, library_version
from cardan_torch.gpu.settings import (
    EMULATED,
    GPU,
    check_options,
    recommended_dtype,
    shared_options,
)

if TYPE_CHECKING:
    from cardan_torch.gpu.accelerator import Accelerator, ChipFacts

ANOTHER_PLATFORM = "Choose another platform; `cardan platforms` shows what can run"
SCORE = 100
"""Above every platform of the host's own processors."""


class GpuPlatform(Platform):
    """GPUs of one vendor through torch and Triton.

    Attributes:
        vendor: what an installation looks like.
        library: whose attention is preferred to Triton's, and the name of the backend.
        emulated_arch: the chip that the stand-in answers for.
        kind: whether a GPU is used or the stand-in.
        root: stands for ``/`` where drivers are looked for.
    """

    api_range = (1, 1)
    vendor: Vendor
    library: str
    emulated_arch: str
    kind: str = GPU
    root: Path = Path("/")

    def probe(self) -> Availability:
        """Usable where torch was built for the vendor's runtime, and a driver and a GPU are there."""
        if self.kind == EMULATED:
            return Availability(0, f"a stand-in for {self.emulated_arch} on the CPU, with interpreted kernels")
        missing = lacking(self.vendor, self.root)
        if missing is not None:
            return Availability(0, missing, usable=False, proven=self._proven())
        return Availability(SCORE, f"torch, triton and {self.vendor.name}'s driver are installed")

    def devices(self) -> tuple[DeviceInfo, ...]:
        """The GPUs that are visible, or the stand-in."""
        if self.kind == EMULATED:
            return (self._describe(0, self.stand_in().chip),)
        if lacking(self.vendor, self.root) is not None:
            return ()
        import torch

        from cardan_torch.gpu.accelerator import read_chip

        return tuple(self._describe(index, read_chip(index)) for index in range(torch.cuda.device_count()))

    def capabilities(self, device: DeviceInfo) -> Capabilities:
        """What works on a chip, none of which was run on one; nothing attends on one that the kernels do not know."""
        note = "No kernel of this platform has been run on a GPU by Cardan's tests; each answer says what was done."
        arch = arch_of(device)
        features, refusal = self.features(arch), self.why_not_chip(arch)
        if refusal is not None:
            answer = unsupported(refusal, ANOTHER_PLATFORM)
            features |= {name: answer for name in features if name.startswith("attention:")}
        return Capabilities(features=features, page_sizes=PAGE_SIZES, notes=(note,))

    @abc.abstractmethod
    def features(self, arch: str) -> dict[str, Capability]:
        """Answers for a chip."""

    def options(self) -> tuple[OptionSpec, ...]:
        """See ``cardan_torch.gpu.settings``."""
        return shared_options()

    def configured(self, options: Mapping[str, Any]) -> GpuPlatform:
        """The platform for a GPU or for the stand-in.

        Raises:
            ConfigError: a value cannot be, or the stand-in cannot run in this process.
        """
        check_options(options)
        chosen = copy.copy(self)
        chosen.kind = str(options.get("device", self.kind))
        if chosen.kind == EMULATED:
            chosen.stand_in()
        return chosen

    def recommend(self, facts: ModelFacts, device: DeviceInfo) -> Mapping[str, Recommendation]:
        """Sizes by memory, a type for tensor cores, and the attention backend with the reason."""
        return {
            **GPU_MEMORY.recommended_sizes(device.total_memory),
            "dtype": recommended_dtype(facts),
            "attention_backend": self.recommended_attention(facts, arch_of(device)),
        }

    def recommended_attention(self, facts: ModelFacts, arch: str) -> Recommendation:
        """The library's attention where it takes all layers of a model on a chip, else Triton's, and why."""
        reason = self.why_not_library(facts, arch)
        if reason is None:
            return Recommendation(self.library, f"{self.library} is installed and takes all layers")
        return Recommendation("triton", reason)

    @abc.abstractmethod
    def why_not_library(self, facts: ModelFacts, arch: str) -> str | None:
        """Why the library does not attend for a model on a chip; None where it does."""

    def why_not_chip(self, arch: str) -> str | None:
        """Why the kernels do not run on a chip; None where they know it."""
        from cardan_kernels.chips import CHIPS

        known = [chip.name for chip in CHIPS.values() if chip.family == self.vendor.runtime]
        return None if arch in known else f"the kernels are for {', '.join(known)}, this is {arch}"

    def open(self, device: DeviceInfo, options: Mapping[str, Any]) -> OpsDevice:
        """Open a GPU, or the stand-in.

        Raises:
            ConfigError: a value cannot be, or the stand-in cannot run in this process.
            UnsupportedError: kernels do not know the chip.
        """
        chosen = self.configured(options)
        if chosen.kind == EMULATED:
            return self.make_device(device, chosen.stand_in(), options)
        refusal = self.why_not_chip(arch_of(device))
        if refusal is not None:
            raise UnsupportedError(f"{device.name} cannot be used: {refusal}. {ANOTHER_PLATFORM}.")
        from cardan_torch.gpu.accelerator import TorchAccelerator

        return self.make_device(device, TorchAccelerator(device.index), options)

    @abc.abstractmethod
    def make_device(self, device: DeviceInfo, accelerator: Accelerator, options: Mapping[str, Any]) -> OpsDevice:
        """The device over an open accelerator."""

    def stand_in(self) -> Accelerator:
        """What takes a GPU's place.

        Raises:
            ConfigError: kernels are not interpreted in this process.
        """
        from cardan_torch.gpu.emulation import EmulatedAccelerator

        return EmulatedAccelerator(self.emulated_arch)

    def _describe(self, index: int, chip: ChipFacts) -> DeviceInfo:
        libraries = ", ".join(f"{name} {library_version(name, name)}" for name in ("torch", "triton"))
        detail = f"{chip.arch}, {chip.units} units, {chip.runtime}, {libraries}"
        return DeviceInfo(index=index, name=chip.name, detail=detail, total_memory=chip.total_memory)

    def _proven(self) -> str:
        claims = proof(self.features(self.emulated_arch))
        return (
            f"What was proven without a GPU: of the answers for {self.emulated_arch}, {claims} (interpreted: the "
            "kernel ran in Triton's interpreter on a CPU against float64 references, and the host code around it on a "
            "stand-in for the GPU; `make kernels-compile` compiles the kernels for real chips). "
            f"TRITON_INTERPRET=1 cardan conform --platform {self.name} --platform-option device=emulated tries all "
            "of it on this machine, slowly."
        )


def arch_of(device: DeviceInfo) -> str:
    """The chip's name in the description of a device."""
    return device.detail.partition(",")[0]
