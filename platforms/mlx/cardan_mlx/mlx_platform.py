"""The MLX platform: probing, capabilities, recommendations, and opening the device.

It imports MLX only where a device is asked for, so that listing platforms stays cheap.
"""

from __future__ import annotations

import platform as host
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cardan.errors import ConfigError, UnsupportedError
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
    Requantized,
    Support,
)
from cardan.quantization import FLOAT8_FORMATS, INTEGER_FORMATS
from cardan_mlx.backend import Backend, backend, missing
from cardan_mlx.repacking import AFFINE_BITS, AFFINE_GROUPS, EXACT, REQUANTIZED

APPLE_SCORE = 50
"""On Apple silicon: above the CPU platform."""
CPU_BUILD_SCORE = 5
"""MLX's CPU build is slow, so the CPU platform goes first where both are installed."""

WIDENED_FORMATS = ("Q2_K", "Q3_K")
AFFINE_FORMATS = tuple(
    f"AFFINE{bits}_{group}_{scale}"
    for bits in AFFINE_BITS
    for group in AFFINE_GROUPS
    for scale in ("F16", "BF16", "F32")
)
DTYPES = ("float16", "bfloat16", "float32")
NARROW_KV = "Pass --kv-cache-dtype bfloat16"
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

CHUNK = 1024
ROWS = 64


class MlxPlatform(Platform):
    """Apple's MLX: the GPU of a Mac through Metal, or MLX's CPU build."""

    name = "mlx"
    api_range = (1, 1)

    def probe(self) -> Availability:
        """Usable where MLX is installed and computes on Metal or in its CPU build."""
        lacking = missing(on_linux=host.system() == "Linux")
        if lacking is not None:
            return Availability(0, lacking, usable=False)
        if not _on_apple():
            return Availability(CPU_BUILD_SCORE, "mlx is installed; its CPU build is slow")
        try:  # a Mac may have either; MLX knows without touching the GPU
            found = backend()
        except (ImportError, UnsupportedError) as error:
            return Availability(0, str(error), usable=False)
        if found is Backend.METAL:
            return Availability(APPLE_SCORE, "mlx is installed, on Apple silicon")
        return Availability(CPU_BUILD_SCORE, "mlx is installed without Metal; its CPU build is slow")

    def devices(self) -> tuple[DeviceInfo, ...]:
        """The GPU, or the cores together."""
        if missing(on_linux=host.system() == "Linux") is not None:
            return ()
        from cardan_mlx.memory import describe_device

        return (describe_device(),)

    def capabilities(self, device: DeviceInfo) -> Capabilities:
        """What works: what Metal does has not been run, the CPU build is what the tests run on."""
        if backend() is Backend.METAL:
            notes = ("Nothing here has been run on Metal; every answer is from the CPU build or from reading.",)
            return Capabilities(features=_features(metal=True), page_sizes=PAGE_SIZES, notes=notes)
        return Capabilities(features=_features(metal=False), page_sizes=PAGE_SIZES)

    def options(self) -> tuple[OptionSpec, ...]:
        """How much freed memory MLX keeps."""
        return (
            OptionSpec(
                name="cache_limit_mib",
                kind=int,
                default=0,
                help="freed buffers that MLX keeps for reuse, in MiB; 0 chooses by the size of the memory",
            ),
        )

    def configured(self, options: Mapping[str, Any]) -> Platform:
        """See ``Platform.configured``; nothing depends on the options, but what cannot be is refused before a plan.

        Raises:
            ConfigError: ``cache_limit_mib`` is negative.
        """
        _cache_limit(options)
        return self

    def recommend(self, facts: ModelFacts, device: DeviceInfo) -> Mapping[str, Recommendation]:
        """Sizes for one user's machine, and the type of activations that the weights' scales fit."""
        return {
            "chunked_prefill_size": Recommendation(CHUNK, "a chunk fills the GPU, and its scores stay small"),
            "max_running_requests": Recommendation(ROWS, "decode steps beyond it gain little on one machine"),
            "dtype": _recommended_dtype(facts, metal=backend() is Backend.METAL),
        }

    def open(self, device: DeviceInfo, options: Mapping[str, Any]) -> OpsDevice:
        """Open the device.

        Raises:
            ConfigError: ``cache_limit_mib`` is negative.
        """
        limit = _cache_limit(options)
        from cardan_mlx.device import MlxDevice

        return MlxDevice(device, limit)


def _cache_limit(options: Mapping[str, Any]) -> int:
    limit = int(options.get("cache_limit_mib", 0))
    if limit < 0:
        raise ConfigError(
            f"--platform-option cache_limit_mib must be 0 (automatic) or more, got {limit}. "
            "Pass --platform-option cache_limit_mib=0, or a number of MiB."
        )
    return limit


def _on_apple() -> bool:
    return host.system() == "Darwin" and host.machine() == "arm64"


def _recommended_dtype(facts: ModelFacts, *, metal: bool) -> Recommendation:
    blocks = any(fmt in EXACT or fmt in REQUANTIZED for fmt in facts.weight_formats)
    if not metal:
        return Recommendation("float32", "MLX's CPU build multiplies float32 fastest")
    if blocks and not facts.family.startswith("gemma"):
        return Recommendation("float16", "scales of block formats are float16, which bfloat16 cannot hold exactly")
    if blocks:
        return Recommendation("float32", "scales of block formats are float16, and this family overflows float16")
    if facts.native_dtype in DTYPES:
        return Recommendation(facts.native_dtype, "what the checkpoint was made for")
    return Recommendation("float16", "half the bytes of float32")


def _features(*, metal: bool) -> dict[str, Capability]:
    evidence = Evidence.NONE if metal else Evidence.HARDWARE

    def native(reason: str) -> Capability:
        return Capability(Support.NATIVE, reason, evidence)

    def emulated(reason: str) -> Capability:
        return Capability(Support.EMULATED, reason, evidence)

    features: dict[str, Capability] = {
        "attention:gather": native("keys and values gathered by slot, queries in blocks"),
        "attention:metal": _metal_kernel(metal=metal),
        Feature.SLIDING_WINDOW: native("only the window's slots are read"),
        Feature.ATTENTION_SOFTCAP: native("scores written out in float32, a bounded block at a time"),
        Feature.ATTENTION_SINKS: native("a score without a value"),
        Feature.SAMPLING: native("on the device"),
        Feature.PENALTIES: native("counts on the device for rows that ask"),
        Feature.LOGIT_BIAS: native("on the device"),
        Feature.HOST_LOGITS: native("copied to the host and back, for rows whose processor asks"),
        Feature.LOGPROBS: native("of the model's own logits"),
        Feature.PROMPT_LOGPROBS: native("of the model's own logits, in blocks"),
        Feature.GRAMMAR_MASK: native("packed masks"),
        Feature.HIDDEN_STATES: native("by the neutral runner, after the final norm"),
        Feature.INPUT_EMBEDS: native("by the neutral runner, in the places of embedded tokens"),
        Feature.MIXED_BATCH: native("decode rows and new prompts attend in one step"),
        Feature.OVERLAP: native("the next decode step is chained on the tokens of the one in flight"),
        Feature.GRAPH: _graph(metal=metal),
        Feature.TENSOR_PARALLEL: Capability(
            Support.UNSUPPORTED, "there is one device", alternative="Run without --tp-size"
        ),
    }
    slow = native if metal else emulated
    features["dtype:float16"] = slow("multiplied as it is" if metal else "very slow in MLX's CPU build")
    features["dtype:bfloat16"] = slow("multiplied as it is" if metal else "slow in MLX's CPU build")
    features["dtype:float32"] = native("multiplied as it is")
    for dtype in DTYPES:
        features[f"kv_dtype:{dtype}"] = native("one array per layer")
    for dtype in ("fp8_e4m3", "fp8_e5m2", "int8"):
        features[f"kv_dtype:{dtype}"] = Capability(
            Support.UNSUPPORTED, "no attention kernel here reads keys and values of 8 bits", alternative=NARROW_KV
        )
    return features | _formats(native, emulated)


def _formats(native: Any, emulated: Any) -> dict[str, Capability]:
    formats = {f"weights:{fmt}": native("converted to the type of the activations") for fmt in ("F32", "F16", "BF16")}
    for fmt in EXACT:
        formats[f"weights:{fmt}"] = native("mapped exactly onto MLX's affine groups of 32")
    for fmt in AFFINE_FORMATS:
        formats[f"weights:{fmt}"] = native("MLX's own affine groups")
    for fmt, why in REQUANTIZED.items():
        formats[f"weights:{fmt}"] = replace(native(why), requantized=Requantized(bits=8, group=32))
    for fmt in WIDENED_FORMATS:
        formats[f"weights:{fmt}"] = emulated("MLX has no groups of 16")
    for fmt in (*INTEGER_FORMATS, *FLOAT8_FORMATS, "MXFP4"):
        formats[f"weights:{fmt}"] = emulated("no GEMM here takes such groups")
    for name, bits in (("mlx_q4", 4), ("mlx_q8", 8)):
        made = native(f"dense weights to {bits} bits over groups of 64 at load")
        formats[f"quantize:{name}"] = replace(made, requantized=Requantized(bits, group=64))
    return formats


def _metal_kernel(*, metal: bool) -> Capability:
    if metal:
        return Capability(
            Support.NATIVE, "a Metal kernel for decode steps that reads the pool in place; not run yet", Evidence.NONE
        )
    return Capability(Support.UNSUPPORTED, "the kernel needs Metal", Evidence.NONE, "Pass --attention-backend gather")


def _graph(*, metal: bool) -> Capability:
    if metal:
        return Capability(Support.NATIVE, "mx.compile for each bucket of rows and KV width; not run yet", Evidence.NONE)
    return Capability(
        Support.UNSUPPORTED,
        "mx.compile calls the C++ compiler for seconds a bucket in MLX's CPU build, and gains nothing there",
        Evidence.HARDWARE,
        "Decode steps run eagerly",
    )


platform = MlxPlatform()
