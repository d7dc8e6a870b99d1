"""The CPU platform: probing, capabilities, recommendations, and opening the device.

Listing platforms imports neither torch nor kernels. Two kinds of kernels compute, those of ``cardan_native`` and
torch's; which, ``cardan_cpu.kernels`` decides.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cardan.errors import ConfigError
from cardan.platform import (
    Availability,
    Capabilities,
    DeviceInfo,
    Evidence,
    ModelFacts,
    OpsDevice,
    OptionSpec,
    Platform,
    Recommendation,
    Tuner,
    host_memory,
)
from cardan_cpu.features import DENSE_FORMATS, native_features, torch_features
from cardan_cpu.host import Host, compute_threads, read_host
from cardan_cpu.kernels import KINDS, NATIVE, TORCH, VERIFIED, Choice, choose, require
from cardan_cpu.native_linear import ACTIVATIONS

SCORE = 10
"""Low, so that ``auto`` prefers an accelerator."""

PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

CHUNK = 512
ROWS = 64


class CpuPlatform(Platform):
    """Any CPU, by the native kernels or by torch.

    Attributes:
        asked: which kernels its answers are about, a member of ``KINDS``.
        threads: that compute; 0 chooses.
        activations: what native kernels round them to, a member of ``ACTIVATIONS``.
        crossovers: numbers of rows that were measured, by name; empty for those of the package.
    """

    name = "cpu"
    api_range = (1, 1)
    asked: str = "auto"
    threads: int = 0
    activations: str = ACTIVATIONS[0]
    crossovers: Mapping[str, int] = MappingProxyType({})

    def probe(self) -> Availability:
        """Usable where the native kernels or torch are installed."""
        choice = choose(self.asked)
        if choice.kind is None:
            return Availability(0, choice.reason, usable=False)
        host = read_host()
        return Availability(SCORE, f"{choice.reason}; {host.cores} cores of {host.name}")

    def devices(self) -> tuple[DeviceInfo, ...]:
        """All cores together are one device."""
        host, choice = read_host(), choose(self.asked)
        parts = [f"{host.cores} cores", " ".join(host.flags) or "no vector extensions known"]
        if choice.kind is not None:
            parts.append(choice.name)
        return (DeviceInfo(index=0, name=host.name, detail=", ".join(parts), total_memory=host_memory().total),)

    def capabilities(self, device: DeviceInfo) -> Capabilities:
        """What works; the tests of this platform run on CPUs."""
        choice = choose(self.asked)
        if choice.kind == NATIVE and choice.variant is not None:
            notes = () if VERIFIED.get(choice.variant) is Evidence.HARDWARE else (_untried(choice.variant),)
            return Capabilities(features=native_features(choice.variant), page_sizes=PAGE_SIZES, notes=notes)
        notes = (_slower(choose(NATIVE)),) if choice.kind == TORCH and self.asked == "auto" else ()
        return Capabilities(features=torch_features(read_host()), page_sizes=PAGE_SIZES, notes=notes)

    def options(self) -> tuple[OptionSpec, ...]:
        """The number of threads, which kernels, and what native ones do with activations."""
        return (
            OptionSpec(
                name="threads",
                kind=int,
                default=0,
                help="compute threads; 0 takes the usable cores, or OMP_NUM_THREADS if that is less",
            ),
            OptionSpec(
                name="kernels",
                kind=str,
                default="auto",
                choices=KINDS,
                help="what computes; auto takes the native kernels where cardan-native is installed, else torch",
            ),
            OptionSpec(
                name="activations",
                kind=str,
                default=ACTIVATIONS[0],
                choices=ACTIVATIONS,
                help="what native kernels round activations to over quantized weights; auto does not round float32",
            ),
        )

    def configured(self, options: Mapping[str, Any]) -> CpuPlatform:
        """The platform with the kernels that were asked for.

        Raises:
            ConfigError: they cannot be used here, or ``threads`` is negative.
        """
        asked = str(options.get("kernels", self.asked))
        if asked != "auto":
            require(asked)
        chosen = copy.copy(self)
        chosen.asked = asked
        chosen.threads = _threads(options, self.threads)
        chosen.activations = str(options.get("activations", self.activations))
        return chosen

    def recommend(self, facts: ModelFacts, device: DeviceInfo) -> Mapping[str, Recommendation]:
        """Sizes that suit a few cores, and the type of activations that was measured to be fastest."""
        return {
            "chunked_prefill_size": Recommendation(
                CHUNK, "larger chunks gain little on CPUs, and running requests wait for a chunk"
            ),
            "max_running_requests": Recommendation(ROWS, "beyond this a few cores only share their time out further"),
            "dtype": _recommended_dtype(facts, read_host(), choose(self.asked)),
        }

    def tuner(self, device: DeviceInfo) -> Tuner | None:
        """At how many rows linears of the native kernels change to another; torch's choose by themselves."""
        choice = choose(self.asked)
        if choice.kind != NATIVE or choice.variant is None:
            return None
        from cardan_cpu.native_tuning import NativeTuner

        return NativeTuner(device.name, choice.variant, self.threads or compute_threads(), self.activations)

    def tuned(self, numbers: Mapping[str, int]) -> CpuPlatform:
        """The platform with crossovers that were measured."""
        chosen = copy.copy(self)
        chosen.crossovers = dict(numbers)
        return chosen

    def open(self, device: DeviceInfo, options: Mapping[str, Any]) -> OpsDevice:
        """Set up threads and open the device.

        Raises:
            ConfigError: ``threads`` is negative, or the kernels that were asked for cannot be used here.
        """
        threads = _threads(options, 0)
        choice = require(str(options.get("kernels", self.asked)))
        if choice.kind == NATIVE:
            from cardan_cpu.native_device import NativeDevice

            activations = str(options.get("activations", ACTIVATIONS[0]))
            return NativeDevice(device, threads, activations=activations, crossovers=self.crossovers)
        from cardan_cpu.device import CpuDevice

        return CpuDevice(device, threads)


EXACT_PARAMETERS = 1_000_000_000
"""Largest model whose block formats give float32 activations by default: beyond, keys, values and, with torch, widened
weights would take twice the bytes of bfloat16."""


def _threads(options: Mapping[str, Any], default: int) -> int:
    threads = int(options.get("threads", default))
    if threads < 0:
        raise ConfigError(f"--platform-option threads must be 0 (automatic) or more, got {threads}.")
    return threads


def _slower(native: Choice) -> str:
    return f"torch's kernels compute, which are slower than the native ones: {native.reason}"


def _untried(variant: str) -> str:
    return (
        f"The native kernels for {variant} have been tested with their instructions emulated, not on a processor that "
        "has them; kernels=torch is there to compare."
    )


def _recommended_dtype(facts: ModelFacts, host: Host, choice: Choice) -> Recommendation:
    if facts.native_dtype == "float32":
        return Recommendation("float32", "the checkpoint is float32")
    blocks = sorted(facts.weight_formats.keys() - set(DENSE_FORMATS))
    small = bool(blocks) and facts.num_parameters <= EXACT_PARAMETERS
    if choice.kind == NATIVE:
        if small:
            return Recommendation("float32", "the kernels compute in float32, so nothing is rounded in between")
        return Recommendation("bfloat16", "half the bytes of keys, values and activations; weights stay as they are")
    if host.has_bfloat16:
        return Recommendation("bfloat16", "the processor multiplies bfloat16 in hardware")
    if small:
        return Recommendation("float32", f"the exact values of {', '.join(blocks)} weights, which bfloat16 would round")
    return Recommendation(
        "bfloat16",
        "decode reads every weight once, so half the bytes count; prefill widens weights to float32 block by block",
    )


platform = CpuPlatform()
