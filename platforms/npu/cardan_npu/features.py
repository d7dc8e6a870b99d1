"""What works on NPUs, and how that was verified: on a simulator of torch_npu, never on a device.

It opens no device and imports no torch.
"""

from __future__ import annotations

from cardan.platform import Capability, Evidence, Feature, Support
from cardan.quantization import AFFINE_FORMATS, BLOCK_FORMATS, FLOAT8_FORMATS
from cardan_npu.formats import DENSE_FORMATS, ROUNDED_FORMATS, W4_FORMATS, W8_FORMATS

CODED_KV = ("fp8_e4m3", "fp8_e5m2", "int8")


def native(reason: str) -> Capability:
    """Works by a documented call."""
    return Capability(Support.NATIVE, reason, Evidence.SIMULATOR)


def emulated(reason: str) -> Capability:
    """Works by torch's own operators."""
    return Capability(Support.EMULATED, reason, Evidence.SIMULATOR)


def lacking(reason: str, alternative: str = "") -> Capability:
    """Does not work."""
    return Capability(Support.UNSUPPORTED, reason, Evidence.SIMULATOR, alternative)


def features() -> dict[str, Capability]:
    """All answers."""
    answers: dict[str, Capability] = {
        "dtype:float16": native("every operator takes it"),
        "dtype:bfloat16": native("every operator takes it on Atlas A2 and A3"),
        "dtype:float32": lacking("the fused attention takes 16 bits", "Pass --dtype bfloat16"),
        "kv_dtype:float16": native("pages of 128 tokens, heads side by side"),
        "kv_dtype:bfloat16": native("pages of 128 tokens, heads side by side"),
        "kv_dtype:float32": lacking("the fused attention takes 16 bits", "Pass --kv-cache-dtype bfloat16"),
        "attention:fused": native("npu_fused_infer_attention_score over pages; layers beyond its limits by torch"),
        "attention:torch": emulated("torch's operators in float32 over gathered keys; to compare with"),
        Feature.SLIDING_WINDOW: native("a band for prompts; the window's pages and a mask for decode"),
        Feature.ATTENTION_SOFTCAP: emulated("the fused call has none: such layers go through torch's operators"),
        Feature.ATTENTION_SINKS: emulated("the fused call has none: such layers go through torch's operators"),
        Feature.SAMPLING: native("on the device"),
        Feature.PENALTIES: native("counts on the device for rows that ask"),
        Feature.LOGIT_BIAS: native("on the device"),
        Feature.HOST_LOGITS: native("copied to the host and back, for rows whose processor asks"),
        Feature.LOGPROBS: native("of the model's own logits"),
        Feature.PROMPT_LOGPROBS: native("of the model's own logits, in blocks"),
        Feature.GRAMMAR_MASK: native("packed masks"),
        Feature.HIDDEN_STATES: native("by the neutral runner, after the final norm"),
        Feature.INPUT_EMBEDS: native("by the neutral runner, in the places of embedded tokens"),
        Feature.MIXED_BATCH: native("layout TND takes rows of any numbers of queries"),
        Feature.GRAPH: native("decode steps are captured by rows; lengths are updated before each replay"),
        Feature.OVERLAP: native("the next decode step is chained on the tokens of the one in flight"),
        Feature.TENSOR_PARALLEL: lacking(
            "the engine runs one rank; HCCL stands behind the seam only", "Run without --tp-size"
        ),
    }
    for dtype in CODED_KV:
        answers[f"kv_dtype:{dtype}"] = lacking(
            "the fused call widens no coded keys over pages in layout TND", "Pass --kv-cache-dtype bfloat16"
        )
    answers.update(_weights())
    return answers


def _weights() -> dict[str, Capability]:
    answers = {f"weights:{fmt}": native("torch's GEMM, in the type of the activations") for fmt in DENSE_FORMATS}
    for fmt in W4_FORMATS:
        answers[f"weights:{fmt}"] = native("npu_weight_quant_batchmatmul: W4A16")
    for fmt in W8_FORMATS:
        answers[f"weights:{fmt}"] = native("npu_weight_quant_batchmatmul: W8A16")
    for fmt in ROUNDED_FORMATS:
        answers[f"weights:{fmt}"] = native("npu_dynamic_quant and npu_quant_matmul: W8A8, a step for each token")
    for fmt in (*BLOCK_FORMATS, *AFFINE_FORMATS, *FLOAT8_FORMATS):
        answers.setdefault(f"weights:{fmt}", emulated(_why_widened(fmt)))
    return answers


def _why_widened(fmt: str) -> str:
    if fmt == "MXFP4" or fmt.startswith("FP8"):
        return "floats of 8 and 4 bits are for Ascend 950 and later"
    return "torch_npu's products take symmetric groups of 32 and more"
