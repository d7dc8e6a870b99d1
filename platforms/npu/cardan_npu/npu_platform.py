"""The NPU platform: probing, capabilities, recommendations, and opening the device.

Listing platforms imports neither torch nor torch_npu; where CANN is missing, it says at once what else is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cardan.errors import ConfigError
from cardan.platform import (
    Availability,
    Capabilities,
    DeviceInfo,
    ModelFacts,
    OpsDevice,
    OptionSpec,
    Platform,
    Recommendation,
)
from cardan_npu.features import features
from cardan_npu.install import Install, find
from cardan_npu.limits import why_not_fused
from cardan_npu.memory import NPU_MEMORY, TOP_BUCKET

SCORE = 60
"""Above other devices that a machine with an NPU may have."""
SIMULATOR_SCORE = 1
"""Usable, and never the first choice."""

PAGE = 128
"""The only page size: the largest that layout TND takes, and a multiple of what every other layout asks."""

PROVEN = "every call runs on a simulator of torch_npu with the documented restrictions; nothing has run on an NPU"


class NpuPlatform(Platform):
    """Ascend NPUs through torch_npu: Atlas A2 and A3, and alike."""

    name = "npu"
    api_range = (1, 1)

    def probe(self) -> Availability:
        """Usable where torch_npu, CANN and an NPU are found, of versions that belong together."""
        found = find()
        lacking = found.missing()
        took = f"(looked in {found.milliseconds:.1f} ms)"
        if lacking:
            return Availability(0, f"{'; '.join(lacking)} {took}", usable=False, proven=PROVEN)
        return Availability(SIMULATOR_SCORE if found.simulated else SCORE, f"{found.describe()} {took}")

    def devices(self) -> tuple[DeviceInfo, ...]:
        """NPUs that torch_npu shows; none where something is missing."""
        found = find()
        return () if found.missing() else _devices(found)

    def capabilities(self, device: DeviceInfo) -> Capabilities:
        """What works: nothing here has been run on an NPU."""
        notes = ("Nothing here has been run on an NPU; every answer is from a simulator of torch_npu.",)
        return Capabilities(features=features(), page_sizes=(PAGE,), notes=notes)

    def options(self) -> tuple[OptionSpec, ...]:
        """The cap on captured steps."""
        return (
            OptionSpec(
                name=TOP_BUCKET,
                kind=int,
                default=0,
                help="most rows of a decode step that is captured; 0 chooses by the size of the memory",
            ),
        )

    def configured(self, options: Mapping[str, Any]) -> Platform:
        """See ``Platform.configured``; nothing depends on the options, but what cannot be is refused before a plan.

        Raises:
            ConfigError: ``graph_max_rows`` is out of range.
        """
        _graph_rows(options)
        return self

    def recommend(self, facts: ModelFacts, device: DeviceInfo) -> Mapping[str, Recommendation]:
        """Sizes by the memory, a type of 16 bits, and which layers the fused attention leaves to torch."""
        return {
            **NPU_MEMORY.recommended_sizes(device.total_memory),
            "page_size": Recommendation(PAGE, f"the fused attention's pages; prefixes are shared in steps of {PAGE}"),
            "dtype": _dtype(facts),
            "attention_backend": _attention(facts),
        }

    def open(self, device: DeviceInfo, options: Mapping[str, Any]) -> OpsDevice:
        """Open the device.

        Raises:
            ConfigError: ``graph_max_rows`` is out of range, or something is missing.
        """
        rows = _graph_rows(options)
        lacking = find().missing()
        if lacking:
            raise ConfigError(f"Platform 'npu' cannot run here: {'; '.join(lacking)}. Pass --platform cpu meanwhile.")
        from cardan_npu.device import NpuDevice

        return NpuDevice(device, rows)


MOST_GRAPH_ROWS = 256


def _graph_rows(options: Mapping[str, Any]) -> int:
    rows = int(options.get(TOP_BUCKET, 0))
    if not 0 <= rows <= MOST_GRAPH_ROWS:
        raise ConfigError(
            f"--platform-option {TOP_BUCKET} must be 0 (automatic) to {MOST_GRAPH_ROWS}, got {rows}. "
            f"Pass --platform-option {TOP_BUCKET}=0, or --disable-graph for none."
        )
    return rows


def _devices(found: Install) -> tuple[DeviceInfo, ...]:
    import torch
    import torch_npu  # noqa: F401  registers the device type

    npu: Any = torch.npu  # type: ignore[attr-defined]
    return tuple(
        DeviceInfo(
            index=index,
            name=str(npu.get_device_name(index)),
            detail=found.describe(),
            total_memory=int(npu.get_device_properties(index).total_memory),
        )
        for index in range(npu.device_count())
    )


def _dtype(facts: ModelFacts) -> Recommendation:
    if facts.native_dtype in ("float16", "bfloat16"):
        return Recommendation(facts.native_dtype, "the checkpoint's own")
    return Recommendation("bfloat16", "the fused attention takes 16 bits, and bfloat16 has the range of float32")


def _attention(facts: ModelFacts) -> Recommendation:
    """Which layers the fused attention takes, for the plan."""
    reasons: dict[str, list[int]] = {}
    for layer in facts.layers:
        why = why_not_fused(layer, "bfloat16", "bfloat16")
        if why is not None:
            reasons.setdefault(why, []).append(layer.index)
    if not reasons:
        return Recommendation("fused", "npu_fused_infer_attention_score takes every layer")
    left = "; ".join(f"{len(indices)} layers by torch's operators, since {why}" for why, indices in reasons.items())
    return Recommendation("fused", f"npu_fused_infer_attention_score, but {left}")


platform = NpuPlatform()
