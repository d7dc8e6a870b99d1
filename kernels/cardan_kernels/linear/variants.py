"""Variants of the kernels of linears: every coding, type and path that a plan can choose.

It compiles nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cardan_kernels.chips import chip
from cardan_kernels.compiled.variant import Variant, empty
from cardan_kernels.linear.coded import coded_linear, coded_rows
from cardan_kernels.linear.coding import CodedMatrix, Coding, ScaledMatrix
from cardan_kernels.linear.scaled import scaled_linear

INNER, COLUMNS = 4096, 4096
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
GEMV_ROWS = (1, 2, 4, 8)
GEMM_ROWS = (16, 64, 512)
GROUPS = (32, 64, 128)
ENDS = ("plain", "bias and residual")


def variants(name: str) -> tuple[Variant, ...]:
    """Variants for one chip."""
    return (*_coded(), *_rows(), *_scaled(chip(name).float8))


def _matrix(coding: Coding, group: int) -> CodedMatrix:
    codes = empty((COLUMNS, INNER * coding.bits // 8), torch.uint8)
    dtype = torch.float32 if coding in (Coding.FLOAT4, Coding.FLOAT8) else torch.float16
    scales = empty((INNER // group, COLUMNS), dtype)
    return CodedMatrix(coding, codes, scales, scales if coding.has_offset else None, group, INNER)


def _ends(end: str, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if end == "plain":
        return None, None
    return empty((COLUMNS,), dtype), empty((rows, COLUMNS), dtype)


def _coded() -> Iterator[Variant]:
    for coding in Coding:
        for group in (32,) if coding is Coding.FLOAT4 else GROUPS:
            for key, dtype in DTYPES.items():
                for rows in (*GEMV_ROWS, *GEMM_ROWS):
                    for end in ENDS:
                        yield _coded_variant(coding, group, (key, dtype), rows, end)


def _coded_variant(coding: Coding, group: int, kind: tuple[str, torch.dtype], rows: int, end: str) -> Variant:
    key, dtype = kind

    def run() -> torch.Tensor:
        return coded_linear(empty((rows, INNER), dtype), _matrix(coding, group), *_ends(end, rows, dtype))

    features = {"coding": coding.name, "group": f"group {group}", "dtype": key, "rows": f"{rows} rows", "end": end}
    return Variant("coded_linear", features, run)


def _rows() -> Iterator[Variant]:
    for coding in Coding:
        for key, dtype in DTYPES.items():

            def run(coding: Coding = coding, dtype: torch.dtype = dtype) -> torch.Tensor:
                return coded_rows(empty((16,), torch.int32), _matrix(coding, 32), dtype)

            yield Variant("coded_rows", {"coding": coding.name, "dtype": key}, run)


def _scaled(float8: torch.dtype | None) -> Iterator[Variant]:
    kinds = {"int8": torch.int8} | ({} if float8 is None else {"float8": float8})
    for kind, dtype in kinds.items():
        for scales in ("rows", "groups"):
            for out in ("bfloat16", "float16"):
                for rows in (1, *GEMM_ROWS):
                    for end in ENDS:
                        yield _scaled_variant((kind, dtype), scales, out, rows, end)


def _scaled_variant(kind: tuple[str, torch.dtype], scales: str, out: str, rows: int, end: str) -> Variant:
    name, dtype = kind

    def run() -> torch.Tensor:
        groups = 1 if scales == "rows" else INNER // 128
        weight = ScaledMatrix(empty((COLUMNS, INNER), dtype), empty((groups, COLUMNS), torch.float32), INNER // groups)
        x_scales = empty((rows, groups if kind[0] == "float8" else 1), torch.float32)
        ends = _ends(end, rows, DTYPES[out])
        return scaled_linear(empty((rows, INNER), dtype), x_scales, weight, *ends, out_dtype=DTYPES[out])

    features = {"codes": name, "scales": f"scales of {scales}", "out": out, "rows": f"{rows} rows", "end": end}
    return Variant("scaled_linear", features, run)
