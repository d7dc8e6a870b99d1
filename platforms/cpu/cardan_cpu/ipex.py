"""Whether Intel's extension for torch (IPEX) can attend on this machine, found without importing it or torch.

It knows no layer. IPEX ended with 2.8, each release of it goes with the torch of its number.
"""

from __future__ import annotations

from importlib import metadata, util

from cardan.platform import Capability, Evidence, Support

IPEX = "ipex"
"""The attention backend's name."""
PACKAGE = "intel-extension-for-pytorch"
MODULE = "intel_extension_for_pytorch"


def why_not_ipex() -> str | None:
    """What keeps IPEX from attending here; None where nothing that can be seen from outside does."""
    if util.find_spec(MODULE) is None:
        return f"{PACKAGE} is not installed; its last release, 2.8, needs torch 2.8"
    ours, torchs = (_release(name) for name in (PACKAGE, "torch"))
    unknown = [name for name, found in ((PACKAGE, ours), ("torch", torchs)) if found is None]
    if unknown:
        return (
            f"the version of {' and '.join(unknown)} cannot be read: install both with pip, in releases of one number"
        )
    if ours != torchs:
        return f"{PACKAGE} {ours} needs torch {ours}, and here is torch {torchs}"
    return None


def ipex_capability() -> Capability:
    """The answer about ``--attention-backend ipex``."""
    lacking = why_not_ipex()
    if lacking is not None:
        return Capability(Support.UNSUPPORTED, lacking, alternative="Pass --attention-backend torch")
    return Capability(
        Support.NATIVE,
        "decode steps read keys and values by slot, by IPEX's kernel; prompts by torch's attention",
        Evidence.HARDWARE,
    )


def _release(name: str) -> str | None:
    """The first two numbers of a package's version, where it says one."""
    try:
        return ".".join(metadata.version(name).split(".")[:2])
    except metadata.PackageNotFoundError:
        return None
