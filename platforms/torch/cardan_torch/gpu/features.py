"""What every GPU platform can do by its own kernels, and by which evidence; a platform adds what only its chips have.

It opens no device and imports no kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

from cardan.platform import Capability, Evidence, Feature, Support
from cardan.quantization import AFFINE_FORMATS, FLOAT8_FORMATS, INTEGER_FORMATS

DENSE_FORMATS = ("F32", "F16", "BF16")
WIDENED_FORMATS = ("Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
ROUNDED_FORMATS = tuple(fmt for fmt in INTEGER_FORMATS if fmt.endswith("_A8"))
CODED_FORMATS = (
    *("Q4_0", "Q4_1", "Q8_0", "MXFP4"),
    *(fmt for fmt in (*AFFINE_FORMATS, *INTEGER_FORMATS) if fmt not in ROUNDED_FORMATS),
)
DTYPES = ("bfloat16", "float16", "float32")
FLOAT8_KV = ("fp8_e4m3", "fp8_e5m2")
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def interpreted(reason: str) -> Capability:
    """Works by kernels, and host code around them, that were run on a stand-in for the device."""
    return Capability(Support.NATIVE, reason, Evidence.INTERPRETED)


def unproven(reason: str) -> Capability:
    """Works by a library that could not be run."""
    return Capability(Support.NATIVE, reason, Evidence.NONE)


def unsupported(reason: str, alternative: str) -> Capability:
    """Does not work."""
    return Capability(Support.UNSUPPORTED, reason, Evidence.NONE, alternative)


def widened(reason: str) -> Capability:
    """A weight format that is widened at load."""
    return Capability(Support.EMULATED, reason, Evidence.INTERPRETED)


def common_features(graphs: str) -> dict[str, Capability]:
    """Answers that hold for each chip that kernels know.

    Args:
        graphs: the vendor's name for captured work.
    """
    features: dict[str, Capability] = {
        "attention:triton": interpreted("paged kernels: prefill in tiles, decode split over the chip"),
        Feature.SLIDING_WINDOW: interpreted("only the window's keys are read"),
        Feature.ATTENTION_SOFTCAP: interpreted("applied to scores as they arise"),
        Feature.ATTENTION_SINKS: interpreted("a score without a value"),
        Feature.GRAPH: interpreted(f"decode steps are captured as {graphs} for a ladder of row counts"),
        Feature.OVERLAP: interpreted("sampled tokens stay on the device, results come back on a stream of their own"),
        Feature.SAMPLING: interpreted("on the device"),
        Feature.PENALTIES: interpreted("counts on the device for rows that ask, applied by one kernel with masks"),
        Feature.LOGIT_BIAS: interpreted("sparse, added by a kernel"),
        Feature.HOST_LOGITS: interpreted("copied to the host and back, for rows whose processor asks"),
        Feature.LOGPROBS: interpreted("of the model's own logits"),
        Feature.PROMPT_LOGPROBS: interpreted("of the model's own logits, in blocks"),
        Feature.GRAMMAR_MASK: interpreted("packed masks, read by the kernel that applies penalties"),
        Feature.HIDDEN_STATES: interpreted("copied to the host for requests that ask"),
        Feature.INPUT_EMBEDS: interpreted("vectors put into the places of their tokens"),
        Feature.MIXED_BATCH: interpreted("decode rows and new prompts attend in one step"),
        Feature.TENSOR_PARALLEL: unsupported("the engine runs one rank", "Run without --tp-size"),
    }
    for dtype in DTYPES:
        features[f"dtype:{dtype}"] = interpreted("multiplied as it is, sums in float32")
        features[f"kv_dtype:{dtype}"] = interpreted("one tensor per layer")
    for dtype in FLOAT8_KV:
        features[f"kv_dtype:{dtype}"] = interpreted("rounded as they are written, widened as they are read")
    features["kv_dtype:int8"] = unsupported(
        "no attention kernel here reads codes with a scale for each head", "Pass --kv-cache-dtype fp8_e4m3"
    )
    return features


def format_features(*, float8: bool, refused: Mapping[str, str]) -> dict[str, Capability]:
    """Answers for weight formats.

    Args:
        float8: whether the chip multiplies floats of 8 bits.
        refused: formats that the chip does not take, with the reason.
    """
    features: dict[str, Capability] = {}
    for fmt in DENSE_FORMATS:
        features[f"weights:{fmt}"] = interpreted("converted to the type of the activations, then torch's GEMM")
    for fmt in CODED_FORMATS:
        features[f"weights:{fmt}"] = interpreted("multiplied as they are by Triton's kernels")
    for fmt in ROUNDED_FORMATS:
        features[f"weights:{fmt}"] = interpreted("multiplied with activations rounded to int8, as the format means")
    for fmt in FLOAT8_FORMATS:
        features[f"weights:{fmt}"] = interpreted(
            "multiplied with activations rounded to floats of 8 bits; with float32 activations as they are"
            if float8
            else "widened as they are multiplied, since this chip multiplies no floats of 8 bits"
        )
    for fmt in WIDENED_FORMATS:
        features[f"weights:{fmt}"] = widened("no kernel here takes blocks with scales of their own")
    for fmt, reason in refused.items():
        features[f"weights:{fmt}"] = Capability(Support.UNSUPPORTED, reason, Evidence.NONE, "Choose another checkpoint")
    return features


def proof(features: Mapping[str, Capability]) -> str:
    """How many answers rest on which evidence, for people: ``61 interpreted, 4 none``."""
    counts = dict.fromkeys(Evidence, 0)
    for answer in features.values():
        if answer.support is not Support.UNSUPPORTED:
            counts[answer.evidence] += 1
    return ", ".join(f"{count} {kind.value}" for kind, count in counts.items() if count)
