"""The page on quantized checkpoints says what the platforms and the readers say."""

from __future__ import annotations

from pathlib import Path

import pytest

from cardan.platform import Capability, Support
from cardan.quantization import AFFINE_GROUPS, FORMATS
from cardan.weights.quantized import METHODS
from cardan_cpu.features import native_features, torch_features
from cardan_cpu.host import read_host
from cardan_npu.features import features as npu_features

PAGE = (Path(__file__).parents[1] / "docs/quantization.md").read_text(encoding="utf-8")
WEIGHTS = PAGE.partition("## Keys and values")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in WEIGHTS.splitlines() if line.startswith("| ")]
COLUMNS = {"cpu, native kernels": 3, "cpu, torch": 4, "mlx": 5, "npu": 6}


def formats_of(row: list[str]) -> list[str]:
    names = [name.strip("` ") for name in row[2].split(",")]
    return [name.replace("_G_", f"_{group}_") for name in names for group in AFFINE_GROUPS]


def answers(column: str) -> dict[str, Capability]:
    if column == "mlx":
        pytest.importorskip("mlx.core")
        from cardan_mlx import platform

        return dict(platform.capabilities(platform.devices()[0]).features)
    if column == "npu":
        return {str(name): answer for name, answer in npu_features().items()}
    if column == "cpu, torch":
        return {str(name): answer for name, answer in torch_features(read_host()).items()}
    pytest.importorskip("cardan_native")
    from cardan_native import chosen

    return {str(name): answer for name, answer in native_features(chosen()).items()}


def how(answer: Capability) -> str:
    if answer.support is not Support.NATIVE:
        return "widened"
    return "as it is" if answer.requantized is None else "packed anew"


@pytest.mark.parametrize("column", COLUMNS)
def test_each_row_says_what_the_platform_does(column: str) -> None:
    given = answers(column)
    assert len(ROWS) > 10
    for row in ROWS[1:]:
        for fmt in formats_of(row):
            assert row[COLUMNS[column]] == how(given[f"weights:{fmt}"]), fmt


def test_every_method_and_every_kind_of_format_has_a_row() -> None:
    text = " ".join(row[0] for row in ROWS)
    assert all(f"`{method}`" in text for method in METHODS)
    listed = {fmt for row in ROWS[1:] for fmt in formats_of(row)}
    kinds = {fmt.partition("_")[0] for fmt, spec in FORMATS.items() if spec.quantized and "_K" not in fmt}
    assert kinds == {fmt.partition("_")[0] for fmt in listed if "_K" not in fmt}
    assert {fmt for fmt in FORMATS if fmt.endswith("_K")} == {fmt for fmt in listed if fmt.endswith("_K")}
    assert listed <= FORMATS.keys()
