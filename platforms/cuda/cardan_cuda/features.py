"""What NVIDIA's chips can do, and why.

It opens no device and imports no kernel.
"""

from __future__ import annotations

from cardan.platform import Capability
from cardan_torch.gpu.features import common_features, format_features, unproven, unsupported

FLOAT8_FROM = 89
"""Compute capability from which tensor cores multiply floats of 8 bits."""


def has_float8(arch: str) -> bool:
    """Whether a chip multiplies floats of 8 bits."""
    return int(arch.removeprefix("sm_")) >= FLOAT8_FROM


def cuda_features(arch: str, flashinfer: str | None) -> dict[str, Capability]:
    """Answers for a chip.

    Args:
        arch: such as ``sm_90``.
        flashinfer: its version, or None where it is not installed.
    """
    features = common_features("CUDA graphs") | format_features(float8=has_float8(arch), refused={})
    features["attention:flashinfer"] = (
        unsupported("flashinfer is not installed", "Pass --attention-backend triton")
        if flashinfer is None
        else unproven(f"paged wrappers of flashinfer {flashinfer}; layers that they do not take go through Triton")
    )
    return features
