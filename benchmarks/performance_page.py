"""Sections of docs/performance.md that benchmarks write between marks; what stands around them is left alone."""

from __future__ import annotations

import os
import platform
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"


def write_section(name: str, text: str) -> None:
    """Replace what stands between the marks of this section."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    page = PAGE.read_text()
    head, rest = page.split(begin)
    PAGE.write_text(head + begin + text + end + rest.split(end)[1])


def machine() -> str:
    """The processor, as the kernel names it, and how many cores this process may use."""
    model = platform.processor() or "an unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model} with {_instructions()}, {len(os.sched_getaffinity(0))} cores"


def _instructions() -> str:
    """The widest of the instruction sets that matter to these numbers."""
    flags = Path("/proc/cpuinfo").read_text()
    names = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 bf16", "avx512f": "AVX-512", "avx2": "AVX2"}
    return next((name for flag, name in names.items() if flag in flags), "no vector instructions above SSE")
