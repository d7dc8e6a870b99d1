"""Options and recommendations that GPU platforms share.

It opens no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cardan.errors import ConfigError
from cardan.platform import ModelFacts, OptionSpec, Recommendation
from cardan_torch.gpu.memory import TOP_BUCKET

GPU = "gpu"
EMULATED = "emulated"
LARGEST_BUCKET = 4096
INVARIANT = "batch_invariant_attention"


def shared_options() -> tuple[OptionSpec, ...]:
    """Options of every GPU platform."""
    return (
        OptionSpec(
            name=TOP_BUCKET,
            kind=int,
            default=0,
            help="most rows that decode steps are captured for; 0 chooses by the size of the memory",
        ),
        OptionSpec(
            name=INVARIANT,
            kind=bool,
            default=False,
            help="attention of a row does not depend on the rows beside it, bit for bit; somewhat slower",
        ),
        OptionSpec(
            name="device",
            kind=str,
            default=GPU,
            choices=(GPU, EMULATED),
            help="emulated runs on the CPU with interpreted kernels, very slowly, to try the platform without a GPU",
        ),
    )


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse values that cannot be.

    Raises:
        ConfigError: the largest captured step is negative, or so large that capturing would take minutes.
    """
    top = int(options.get(TOP_BUCKET, 0))
    if not 0 <= top <= LARGEST_BUCKET:
        raise ConfigError(
            f"--platform-option {TOP_BUCKET} must be 0 (automatic) or 1 to {LARGEST_BUCKET} rows, got {top}. "
            f"Pass --platform-option {TOP_BUCKET}=0, or a number of rows; --disable-graph captures nothing."
        )


def recommended_dtype(facts: ModelFacts) -> Recommendation:
    """Tensor cores multiply 16 bits; a model made for float32 keeps its exponents in bfloat16."""
    if facts.native_dtype in ("bfloat16", "float16"):
        return Recommendation(facts.native_dtype, "what the checkpoint was made for")
    if facts.native_dtype == "float32":
        return Recommendation("bfloat16", "half the bytes, on tensor cores; pass --dtype float32 for exact values")
    return Recommendation("bfloat16", "half the bytes, on tensor cores")
