"""What works with each kind of kernels, and why.

It opens no device.
"""

from __future__ import annotations

from dataclasses import replace

from cardan.platform import Capability, Evidence, Feature, Support
from cardan.quantization import FLOAT8_FORMATS, INTEGER_FORMATS, format_spec
from cardan_cpu.host import Host
from cardan_cpu.ipex import IPEX, ipex_capability
from cardan_cpu.kernels import VERIFIED

OF_TORCHS_KERNELS = Capability(
    Support.UNSUPPORTED,
    "it goes with torch's kernels: --platform-option kernels=torch",
    alternative="Pass --attention-backend native",
)
DENSE_FORMATS = ("F32", "F16", "BF16")
BLOCK_FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
AFFINE_FORMATS = tuple(
    f"AFFINE{bits}_{group}_{scale}" for bits in (4, 8) for group in (32, 64, 128) for scale in ("F16", "BF16", "F32")
)
DTYPES = ("bfloat16", "float32", "float16")
FLOAT8_KV = ("fp8_e4m3", "fp8_e5m2")
NO_INT8_KV = Capability(
    Support.UNSUPPORTED,
    "torch's attention reads no scale for each token and head",
    alternative="Pass --platform-option kernels=native, or --kv-cache-dtype fp8_e4m3",
)


def _native(reason: str) -> Capability:
    return Capability(Support.NATIVE, reason, Evidence.HARDWARE)


def _emulated(reason: str) -> Capability:
    return Capability(Support.EMULATED, reason, Evidence.HARDWARE)


def torch_features(host: Host) -> dict[str, Capability]:
    """What works with torch's kernels."""
    bfloat16 = (
        _native("multiplied in hardware") if host.has_bfloat16 else _emulated("widened to float32 where rows are many")
    )
    features: dict[str, Capability] = {
        "dtype:bfloat16": bfloat16,
        "dtype:float32": _native("torch's GEMM"),
        "dtype:float16": _emulated("widened to float32 inside torch"),
        "attention:torch": _native("keys and values gathered by slot, then torch's fused attention"),
        f"attention:{IPEX}": ipex_capability(),
        Feature.SLIDING_WINDOW: _native("only the window's slots are read"),
        Feature.ATTENTION_SOFTCAP: _native("scores written out in float32, a bounded block at a time"),
        Feature.ATTENTION_SINKS: _native("scores written out in float32, a bounded block at a time"),
        **_of_every_kind(),
        "kv_dtype:int8": NO_INT8_KV,
    }
    for dtype in FLOAT8_KV:
        features[f"kv_dtype:{dtype}"] = _emulated("rounded as they are written, widened as they are gathered")
    for fmt in DENSE_FORMATS:
        features[f"weights:{fmt}"] = _native("converted to the type of the activations")
    for fmt in BLOCK_FORMATS:
        features[f"weights:{fmt}"] = _emulated("no GEMM here takes block formats")
    for fmt in AFFINE_FORMATS:
        features[f"weights:{fmt}"] = _emulated("no GEMM here takes affine groups")
    for fmt in (*INTEGER_FORMATS, *FLOAT8_FORMATS):
        features[f"weights:{fmt}"] = _emulated("no GEMM here takes groups with a scale")
    return features


def native_features(variant: str) -> dict[str, Capability]:
    """What works with the native kernels of a variant."""
    features: dict[str, Capability] = {
        "dtype:float32": _native("the type that everything is computed in"),
        "dtype:bfloat16": _native("computed in float32, kept in bfloat16"),
        "dtype:float16": _native("computed in float32, kept in float16"),
        "attention:native": _native("keys and values read by slot, scores never written out"),
        Feature.SLIDING_WINDOW: _native("only the window's slots are read"),
        Feature.ATTENTION_SOFTCAP: _native("applied to scores as they arise"),
        Feature.ATTENTION_SINKS: _native("a score without a value"),
        **_of_every_kind(),
        "kv_dtype:fp8_e4m3": _native("rounded as they are written, widened as they are read"),
        "kv_dtype:fp8_e5m2": _native("rounded as they are written, widened as they are read"),
        "kv_dtype:int8": _native("codes with a scale for each token and head"),
        Feature.GRAPH: _native("decode steps are recorded once for each number of rows, and replayed by one call"),
    }
    taken = _native_formats(variant)
    for fmt in (*DENSE_FORMATS, *BLOCK_FORMATS, *AFFINE_FORMATS, *INTEGER_FORMATS, *FLOAT8_FORMATS):
        how = _native(_how_multiplied(fmt))
        features[f"weights:{fmt}"] = how if fmt in taken else _emulated("no kernel here takes this format")
    evidence = VERIFIED.get(variant, Evidence.NONE)
    features |= {f"attention:{name}": OF_TORCHS_KERNELS for name in ("torch", IPEX)}
    return {name: replace(answer, evidence=evidence) for name, answer in features.items()}


def _how_multiplied(fmt: str) -> str:
    if fmt in DENSE_FORMATS:
        return "multiplied as they are"
    if fmt in FLOAT8_FORMATS:
        return "widened a piece at a time; activations as they are"
    if format_spec(fmt).activations is not None:
        return "multiplied as they are; activations as the option says, which is nearer to them than the format asks"
    return "multiplied as they are; activations as the option says"


def _native_formats(variant: str) -> frozenset[str]:
    from cardan_cpu.native_linear import NativeLinear
    from cardan_native import load

    return NativeLinear(load(variant)).formats


def _of_every_kind() -> dict[str, Capability]:
    features: dict[str, Capability] = {
        Feature.SAMPLING: _native("on the device"),
        Feature.PENALTIES: _native("counts on the device for rows that ask"),
        Feature.LOGIT_BIAS: _native("on the device"),
        Feature.HOST_LOGITS: _native("copied to the host and back, for rows whose processor asks"),
        Feature.LOGPROBS: _native("of the model's own logits"),
        Feature.PROMPT_LOGPROBS: _native("of the model's own logits, in blocks"),
        Feature.GRAMMAR_MASK: _native("packed masks"),
        Feature.HIDDEN_STATES: _native("by the neutral runner, after the final norm"),
        Feature.INPUT_EMBEDS: _native("by the neutral runner, in the places of embedded tokens"),
        Feature.MIXED_BATCH: _native("decode rows and new prompts attend in one step"),
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
        features[f"kv_dtype:{dtype}"] = _native("one tensor per layer")
    return features
