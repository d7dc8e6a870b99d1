"""What AMD's chips can do, and why.

It opens no device and imports no kernel.
"""

from __future__ import annotations

from cardan.platform import Capability
from cardan_rocm.aiter_limits import ARCHS
from cardan_torch.gpu.features import common_features, format_features, unproven, unsupported

FNUZ_ARCHS = ("gfx942",)
"""Chips whose floats of 8 bits have no infinities, no -0, and an exponent bias greater by one."""

FN_ARCHS = ("gfx950",)
"""Chips whose floats of 8 bits are those of the Open Compute Project."""

NVIDIA_FORMATS = {
    "NVFP4": "NVFP4 (blocks of 16 floats of 4 bits with a scale of 8 bits) is multiplied by NVIDIA's tensor cores only",
}
"""Weight formats of another vendor's chips."""


def float8_form(arch: str) -> str | None:
    """``fnuz`` or ``fn``; None where a chip multiplies no floats of 8 bits."""
    if arch in FNUZ_ARCHS:
        return "fnuz"
    return "fn" if arch in FN_ARCHS else None


def rocm_features(arch: str, *, has_aiter: bool) -> dict[str, Capability]:
    """Answers for a chip.

    Args:
        arch: such as ``gfx942``.
        has_aiter: whether AITER is installed.
    """
    form = float8_form(arch)
    features = common_features("HIP graphs") | format_features(float8=form is not None, refused=NVIDIA_FORMATS)
    instead = "Pass --attention-backend triton"
    if not has_aiter:
        features["attention:aiter"] = unsupported("aiter is not installed", instead)
    elif arch not in ARCHS:
        features["attention:aiter"] = unsupported(f"its kernels are for {' and '.join(ARCHS)}", instead)
    else:
        features["attention:aiter"] = unproven("paged kernels of aiter; layers that they do not take go through Triton")
    features["attention:flashinfer"] = unsupported("flashinfer's kernels are for NVIDIA's chips", instead)
    return features
