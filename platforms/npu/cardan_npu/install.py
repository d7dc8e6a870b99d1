"""What of Ascend's software and hardware is on this machine, found without importing or starting any of it.

It knows no device and no model: files, versions and which of them belong together.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

ROOT = Path("/")
CANN_PLACES = ("usr/local/Ascend/cann", "usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/latest")
CANN_VARIABLES = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
CANN_FILE = "ascend_toolkit_install.info"
SIMULATOR_MARK = "SIMULATOR"
"""A file inside a package called torch_npu that says that it computes on the CPU."""

PAIRS: Mapping[str, tuple[str, ...]] = {
    "2.8.0.post4": ("9.0.0", "8.5.0"),
    "2.9.0.post2": ("9.0.0", "8.5.0"),
    "2.10.0": ("9.0.0", "8.5.0"),
    "2.8.0.post2": ("8.5.0",),
    "2.9.0": ("8.5.0",),
}
"""Versions of torch_npu and of CANN that belong together, by the release notes of Ascend Extension for PyTorch 26.0.0
and 7.3.0; the first is the one that the package was made with. The notes name CANN 8.1.RC1 to 8.3.RC1 too;
they are left out, since the fused attention is called as CANN 8.5 and later document it: older pages of torch_npu have
paged keys in layout TND for heads of 512 only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Install:
    """What was found.

    Attributes:
        torch_npu: version of the package, or None.
        package: its folder, or None.
        has_torch: whether torch itself is installed.
        simulated: whether the package is a simulator.
        cann: version of the toolkit, or None.
        cann_file: where that was read, or where it was looked for first.
        devices: NPUs that the driver shows.
        milliseconds: that looking took.
    """

    torch_npu: str | None
    package: Path | None
    has_torch: bool
    simulated: bool
    cann: str | None
    cann_file: Path
    devices: int
    milliseconds: float

    def missing(self) -> tuple[str, ...]:
        """What keeps the platform from running, each with what to do; empty where nothing does."""
        lacking = []
        if not self.has_torch:
            lacking.append("torch is not installed: pip install 'cardan[npu]'")
        if self.torch_npu is None:
            lacking.append("torch_npu is not installed: pip install 'cardan[npu]'")
        if self.simulated:
            return tuple(lacking)
        if self.cann is None:
            lacking.append(
                f"no CANN toolkit is at {self.cann_file} ({' and '.join(CANN_VARIABLES)} may name another place): "
                "install CANN and source its set_env.sh"
            )
        if self.devices == 0:
            lacking.append("the driver shows no NPU (/dev/davinci0): install Ascend's driver, or pass the device on")
        if self.torch_npu is not None and self.cann is not None:
            wrong = check_pair(self.torch_npu, self.cann)
            lacking += [] if wrong is None else [wrong]
        return tuple(lacking)

    def describe(self) -> str:
        """What was found, in a few words."""
        if self.simulated:
            return f"torch_npu {self.torch_npu} is a simulator at {self.package}: computed on the CPU, for tests"
        return f"torch_npu {self.torch_npu} over CANN {self.cann}, {self.devices} NPU{'s' * (self.devices != 1)}"


def check_pair(torch_npu: str, cann: str) -> str | None:
    """Why a version of torch_npu does not go with one of CANN; None where it does."""
    found = f"torch_npu {torch_npu} and CANN {cann} were found"
    known = "; ".join(f"torch_npu {package} with CANN {', '.join(versions)}" for package, versions in PAIRS.items())
    public = torch_npu.partition("+")[0]
    if public not in PAIRS:
        return f"{found}, and this torch_npu is in no known pair. Known are {known}. Install one of these pairs"
    if not any(same_release(cann, version) for version in PAIRS[public]):
        return f"{found}, which do not belong together. Known are {known}. Install one of these pairs"
    return None


def same_release(found: str, known: str) -> bool:
    """Whether a version is a release or a fix of it: 8.5.0 and 8.5.0.1 are, 8.5.0.alpha001 is not."""
    if found == known:
        return True
    rest = found.removeprefix(known)
    return rest != found and re.fullmatch(r"(\.\d+)+", rest) is not None


def find(root: Path = ROOT, environment: Mapping[str, str] | None = None) -> Install:
    """Look for what is needed.

    Args:
        root: stands for ``/``; tests put a tree of fakes there.
        environment: variables, by default those of the process.
    """
    start = time.perf_counter()
    package = _package_folder()
    simulated = package is not None and (package / SIMULATOR_MARK).is_file()
    cann_file, cann = _cann(root, os.environ if environment is None else environment)
    return Install(
        torch_npu=None if package is None else _package_version(package),
        package=package,
        has_torch=util.find_spec("torch") is not None,
        simulated=simulated,
        cann=cann,
        cann_file=cann_file,
        devices=sum(1 for path in (root / "dev").glob("davinci*") if re.fullmatch(r"davinci\d+", path.name)),
        milliseconds=1000 * (time.perf_counter() - start),
    )


def _package_folder() -> Path | None:
    spec = util.find_spec("torch_npu")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def _package_version(package: Path) -> str:
    """What the package's own file says, else its metadata."""
    file = package / "version.py"
    if file.is_file():
        found = re.search(r"""__version__\s*=\s*['"]([^'"]+)['"]""", file.read_text(encoding="utf-8"))
        if found is not None:
            return found.group(1)
    try:
        return metadata.version("torch_npu")
    except metadata.PackageNotFoundError:
        return "unknown"


def _cann(root: Path, environment: Mapping[str, str]) -> tuple[Path, str | None]:
    """The file that tells CANN's version, and the version."""
    named = [Path(environment[name]) for name in CANN_VARIABLES if environment.get(name)]
    folders = [*named, *(root / place for place in CANN_PLACES)]
    for folder in folders:
        for file in (folder / CANN_FILE, *sorted(folder.glob(f"*-linux/{CANN_FILE}"))):
            if file.is_file():
                found = re.search(r"^version=(\S+)", file.read_text(encoding="utf-8"), re.MULTILINE)
                return file, "unknown" if found is None else found.group(1)
    return folders[0], None
