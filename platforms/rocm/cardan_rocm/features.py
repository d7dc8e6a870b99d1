"""What AMD's chips can do, and why.

It opens no device and imports no kernel.
"""

from __future__ import annotations

from cardan.platform import Capability, ModelFacts
from cardan_rocm.aiter_limits import ARCHS
from cardan_torch.gpu.features import common_features, format_features, unproven, unsupported

FNUZ_ARCHS = ("gfx942",)
"""Chips whose floats of 8 bits have no infinities, no -0, and an exponent bias greater by one."""

FN_ARCHS = ("gfx950",)
"""Chips whose floats of 8 bits are those of the Open Compute Project."""

WIDEST_HEADS = {"gfx1100": 128}
"""Widest heads that Triton's prefill keeps in registers, on chips where that is not all: wider ones spill."""

NVIDIA_FORMATS = {
    "NVFP4": "NVFP4 (blocks of 16 floats of 4 bits with a scale of 8 bits) is multiplied by NVIDIA's tensor cores only",
}
"""Weight formats of another vendor's chips."""


def float8_form(arch: str) -> str | None:
    """``fnuz`` or ``fn``; None where a chip multiplies no floats of 8 bits."""
    if arch in FNUZ_ARCHS:
        return "fnuz"
    return "fn" if arch in FN_ARCHS else None


def slow_heads(facts: ModelFacts, arch: str) -> str:
    """What a plan adds to its reason where prompts of a model run slowly on a chip; empty elsewhere."""
    limit = WIDEST_HEADS.get(arch)
    widest = max((max(layer.k_dim, layer.v_dim) for layer in facts.layers), default=0)
    if limit is None or widest <= limit:
        return ""
    return f"; prompts run slowly: Triton's prefill over heads wider than {limit} spills registers on {arch}"


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
