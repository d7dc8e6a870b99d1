"""The CPU platform: probing, capabilities, recommendations, and opening the device.

It imports torch only in ``open``, so that listing platforms stays cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from cardan.errors import ConfigError
from cardan.platform import (
    Availability,
    Capabilities,
    Capability,
    DeviceInfo,
    Evidence,
    Feature,
    ModelFacts,
    OpsDevice,
    OptionSpec,
    Platform,
    Recommendation,
    Support,
    host_memory,
)
from cardan_cpu.host import Host, read_host

SCORE = 10
"""Low, so that ``auto`` prefers an accelerator."""

DENSE_FORMATS = ("F32", "F16", "BF16")
BLOCK_FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
AFFINE_FORMATS = tuple(
    f"AFFINE{bits}_{group}_{scale}" for bits in (4, 8) for group in (32, 64, 128) for scale in ("F16", "BF16", "F32")
)
DTYPES = ("bfloat16", "float32", "float16")
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

CHUNK = 512
ROWS = 64


class CpuPlatform(Platform):
    """Any CPU that torch runs on."""

    name = "cpu"
    api_range = (1, 1)

    def probe(self) -> Availability:
        """Usable where torch is installed."""
        if find_spec("torch") is None:
            return Availability(0, "torch is not installed; `pip install cardan[cpu]` brings it", usable=False)
        host = read_host()
        return Availability(SCORE, f"torch is installed; {host.cores} cores of {host.name}")

    def devices(self) -> tuple[DeviceInfo, ...]:
        """All cores together are one device."""
        host = read_host()
        detail = f"{host.cores} cores, {' '.join(host.flags) or 'no vector extensions known'}"
        return (DeviceInfo(index=0, name=host.name, detail=detail, total_memory=host_memory().total),)

    def capabilities(self, device: DeviceInfo) -> Capabilities:
        """What works; the tests of this platform run on CPUs."""
        return Capabilities(features=_features(read_host()), page_sizes=PAGE_SIZES)

    def options(self) -> tuple[OptionSpec, ...]:
        """The number of threads."""
        return (
            OptionSpec(
                name="threads",
                kind=int,
                default=0,
                help="compute threads; 0 takes the usable cores, or what torch starts with (OMP_NUM_THREADS) if less",
            ),
        )

    def recommend(self, facts: ModelFacts, device: DeviceInfo) -> Mapping[str, Recommendation]:
        """Sizes that suit a few cores, and the type of activations that was measured to be fastest."""
        return {
            "chunked_prefill_size": Recommendation(
                CHUNK, "larger chunks gain little on CPUs, and running requests wait for a chunk"
            ),
            "max_running_requests": Recommendation(ROWS, "beyond this a few cores only share their time out further"),
            "dtype": _recommended_dtype(facts, read_host()),
        }

    def open(self, device: DeviceInfo, options: Mapping[str, Any]) -> OpsDevice:
        """Set up threads and open the device.

        Raises:
            ConfigError: ``threads`` is negative.
        """
        threads = int(options.get("threads", 0))
        if threads < 0:
            raise ConfigError(f"--platform-option threads must be 0 (automatic) or more, got {threads}.")
        from cardan_cpu.device import CpuDevice

        return CpuDevice(device, threads)


EXACT_PARAMETERS = 1_000_000_000
"""Largest model whose block formats are widened to float32 by default: 4 GB, twice what bfloat16 takes."""


def _recommended_dtype(facts: ModelFacts, host: Host) -> Recommendation:
    if facts.native_dtype == "float32":
        return Recommendation("float32", "the checkpoint is float32")
    if host.has_bfloat16:
        return Recommendation("bfloat16", "the processor multiplies bfloat16 in hardware")
    blocks = facts.weight_formats.keys() - set(DENSE_FORMATS)
    if blocks and facts.num_parameters <= EXACT_PARAMETERS:
        return Recommendation(
            "float32", f"the exact values of {', '.join(sorted(blocks))} weights, which bfloat16 would round"
        )
    return Recommendation(
        "bfloat16",
        "decode reads every weight once, so half the bytes count; prefill widens weights to float32 block by block",
    )


def _features(host: Host) -> dict[str, Capability]:
    def native(reason: str) -> Capability:
        return Capability(Support.NATIVE, reason, Evidence.HARDWARE)

    def emulated(reason: str) -> Capability:
        return Capability(Support.EMULATED, reason, Evidence.HARDWARE)

    bfloat16 = (
        native("multiplied in hardware") if host.has_bfloat16 else emulated("widened to float32 where rows are many")
    )
    features: dict[str, Capability] = {
        "dtype:bfloat16": bfloat16,
        "dtype:float32": native("torch's GEMM"),
        "dtype:float16": emulated("widened to float32 inside torch"),
        "attention:torch": native("keys and values gathered by slot, then torch's fused attention"),
        Feature.SLIDING_WINDOW: native("only the window's slots are read"),
        Feature.ATTENTION_SOFTCAP: native("scores written out in float32, a bounded block at a time"),
        Feature.ATTENTION_SINKS: native("scores written out in float32, a bounded block at a time"),
        Feature.SAMPLING: native("on the device"),
        Feature.PENALTIES: native("counts on the device for rows that ask"),
        Feature.LOGIT_BIAS: native("on the device"),
        Feature.LOGPROBS: native("of the model's own logits"),
        Feature.PROMPT_LOGPROBS: native("of the model's own logits, in blocks"),
        Feature.GRAMMAR_MASK: native("packed masks"),
        Feature.MIXED_BATCH: native("decode rows and new prompts attend in one step"),
        Feature.GRAPH: Capability(Support.UNSUPPORTED, "steps run eagerly on this platform"),
        Feature.OVERLAP: Capability(
            Support.UNSUPPORTED,
            "compute runs on the cores that schedule, so a step launched early would only delay the one before it",
            alternative="The plain loop runs instead",
        ),
        Feature.TENSOR_PARALLEL: Capability(
            Support.UNSUPPORTED, "one process uses all cores", alternative="Run without --tp-size"
        ),
    }
    for dtype in DTYPES:
        features[f"kv_dtype:{dtype}"] = native("one tensor per layer")
    for fmt in DENSE_FORMATS:
        features[f"weights:{fmt}"] = native("converted to the type of the activations")
    for fmt in BLOCK_FORMATS:
        features[f"weights:{fmt}"] = emulated("no GEMM here takes block formats")
    for fmt in AFFINE_FORMATS:
        features[f"weights:{fmt}"] = emulated("no GEMM here takes affine groups")
    return features


platform = CpuPlatform()
