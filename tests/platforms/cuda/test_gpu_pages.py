"""Numbers that the pages about GPU platforms give are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from cardan_kernels.chips import CHIPS, COMPILED_FOR
from cardan_rocm.features import float8_form
from cardan_torch.gpu.features import PAGE_SIZES
from cardan_torch.gpu.memory import GPU_MEMORY
from cardan_torch.own_memory import GIB, MIB

PAGES = Path(__file__).parents[3] / "docs" / "platforms"
CUDA, ROCM = ((PAGES / name).read_text(encoding="utf-8") for name in ("cuda.md", "rocm.md"))


def words(page: str) -> str:
    return " ".join(page.split())


def listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def test_page_sizes() -> None:
    assert tuple(2**power for power in range(len(PAGE_SIZES))) == PAGE_SIZES
    assert f"Page sizes are the powers of two from 1 to {PAGE_SIZES[-1]} tokens" in CUDA


def test_chips_that_kernels_are_compiled_for_and_know() -> None:
    for page, family in ((CUDA, "cuda"), (ROCM, "hip")):
        compiled = [name for name in COMPILED_FOR if CHIPS[name].family == family]
        assert f"`make kernels-compile` compiles the kernels for {listed(compiled)}" in words(page)
    others = [name for name, chip in CHIPS.items() if chip.family == "cuda" and name not in COMPILED_FOR]
    assert f"they know {listed(others)} too" in words(CUDA)


def test_the_form_of_floats_of_8_bits_of_each_of_amds_chips() -> None:
    rows = {line.split()[1]: line for line in ROCM.splitlines() if line.startswith("| gfx")}
    assert set(rows) == {name for name, chip in CHIPS.items() if chip.family == "hip"}
    for name, row in rows.items():
        form = float8_form(name)
        assert (f"form `{form}`" if form else "| none |") in row


def test_sizes_by_memory() -> None:
    shown = [line for line in CUDA.splitlines() if line.startswith(("| below", "| above"))]
    assert shown == [
        f"| {f'below {tier.below // GIB} GiB' if tier is not GPU_MEMORY.tiers[-1] else 'above'} "
        f"| {tier.head_room // MIB} MiB | {tier.top_bucket} | {tier.chunk} | {tier.rows} |"
        for tier in GPU_MEMORY.tiers
    ]
    assert GPU_MEMORY.graph_share == 0.25
    assert f"({GPU_MEMORY.graph_bytes // MIB} MiB a size, and a quarter of the largest step)" in CUDA
