"""Whether a GPU can be used, told from files alone: no driver is asked, and torch is not imported.

It knows what NVIDIA's and AMD's installations look like, and no more of either.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor:
    """What to look for.

    Attributes:
        name: of the hardware, for messages.
        runtime: attribute of torch's version file that names the runtime it was built for.
        extra: of Cardan, which brings what is missing from PyPI.
        torch_index: where builds of torch for the runtime are.
        driver: what proves that the kernel's driver is loaded, any of these.
        nodes: patterns of a GPU's own device nodes, any of these.
    """

    name: str
    runtime: str
    extra: str
    torch_index: str
    driver: Sequence[str]
    nodes: Sequence[str]


NVIDIA = Vendor(
    name="NVIDIA",
    runtime="cuda",
    extra="cuda",
    torch_index="https://download.pytorch.org/whl/cu128",
    driver=("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg"),
    nodes=("dev/nvidia[0-9]*", "dev/dxg", "dev/nvgpu/igpu0/*"),
)
AMD = Vendor(
    name="AMD",
    runtime="hip",
    extra="rocm",
    torch_index="https://download.pytorch.org/whl/rocm6.4",
    driver=("sys/module/amdgpu", "dev/kfd"),
    nodes=("dev/dri/renderD*",),
)


def lacking(vendor: Vendor, root: Path = Path("/")) -> str | None:
    """The first thing that is missing and what to do about it; None where a GPU can be used.

    Args:
        vendor: whose.
        root: stands for ``/`` where nodes are looked for.
    """
    for module in ("torch", "triton"):
        if find_spec(module) is None:
            return f"{module} is not installed; `pip install 'cardan[{vendor.extra}]'` brings it"
    built_for = torch_runtime(vendor.runtime)
    if built_for is None:
        kind = {"cuda": "CUDA", "hip": "ROCm"}[vendor.runtime]
        return (
            f"torch {_version('torch')} was built without {kind}; install a build that has it, such as "
            f"`pip install torch --index-url {vendor.torch_index}`"
        )
    if not any((root / name).exists() for name in vendor.driver):
        return f"no {vendor.name} driver is loaded: none of {_listed(vendor.driver, root)} exists; install the driver"
    if not any(True for pattern in vendor.nodes for _ in root.glob(pattern)):
        return (
            f"no {vendor.name} GPU is visible: nothing matches {_listed(vendor.nodes, root)}; "
            "in a container, pass the GPU on to it"
        )
    return None


def torch_runtime(name: str) -> str | None:
    """The runtime that the installed torch was built for, ``12.8``, as its version file says; None for none."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return None if match is None else match.group(1)


def library_version(module: str, distribution: str) -> str | None:
    """The version of an optional library, without importing it; None where it is not installed."""
    return None if find_spec(module) is None else _version(distribution)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "of unknown version"


def _listed(names: Sequence[str], root: Path) -> str:
    return ", ".join(str(root / name) for name in names)
