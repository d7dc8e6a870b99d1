"""Empty libraries in the place of those of CUDA, so that a torch that was built for it starts where there is none.

PyPI has torch 2.8 for Linux on x86 only as it was built for CUDA. What computes on the CPU calls nothing of CUDA, but
the loader wants its libraries, 3 GB. The ones made here have every function that torch's libraries name; each returns
100, which CUDA says where there is no device. It knows nothing of IPEX.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

TOOLS = ("cc", "nm", "readelf")
PREFIXES = r"_*(cu|nccl|nv|__cuda)"
NAMES = r"lib(cu|nccl|nv)"
NO_DEVICE = 100
FUNCTIONS = "libcardan-no-cuda.so"


def missing_tools() -> list[str]:
    """Programs that are needed and not found."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def make_empty_libraries(folder: Path) -> list[str]:
    """Put beside the libraries in ``folder`` those of CUDA that they need and that are not there; returns their names.

    Raises:
        OSError: a program is missing.
        subprocess.CalledProcessError: a program failed.
    """
    libraries = sorted(folder.glob("*.so*"))
    there = {library.name for library in libraries}
    needed = {name for library in libraries for name in needed_by(library) if re.match(NAMES, name)} - there
    if not needed:
        return []
    undefined = {name for library in libraries for name in symbols(library, "-u") if re.match(PREFIXES, name)}
    defined = {name for library in libraries for name in symbols(library, "--defined-only")}
    code = "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in sorted(undefined - defined))
    compile_library(folder / FUNCTIONS, code, ())
    for name in sorted(needed):
        compile_library(folder / name, "", ("-Wl,--no-as-needed", str(folder / FUNCTIONS), "-Wl,-rpath,$ORIGIN"))
    return sorted(needed)


def needed_by(library: Path) -> list[str]:
    """Names of the libraries that the loader brings with one."""
    return re.findall(r"\(NEEDED\).*\[(.+)\]", _said("readelf", "-dW", str(library)))


def symbols(library: Path, which: str) -> list[str]:
    """Names, without versions, that a library defines or leaves to others."""
    lines = _said("nm", "-D", which, str(library)).splitlines()
    return [line.split()[-1].partition("@")[0] for line in lines if line.strip()]


def compile_library(target: Path, code: str, flags: tuple[str, ...]) -> None:
    """A shared library of C code, by the name of its file."""
    command = ("cc", "-w", "-shared", "-fPIC", "-fno-builtin", "-x", "c", "-", "-x", "none", *flags, "-o", str(target))
    subprocess.run((*command, f"-Wl,-soname,{target.name}"), input=code, text=True, check=True, capture_output=True)


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
