"""Choosing variants, reading compiled code and telling what does not fit; a few kernels are really compiled."""

from __future__ import annotations

import itertools
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from cardan_kernels.chips import COMPILED_FOR
from cardan_kernels.compiled import FOLDERS, Variant, variants
from cardan_kernels.compiled.pairwise import select
from cardan_kernels.compiled.run import problems
from cardan_kernels.compiled.table import page, text_table
from cardan_kernels.compiled.target import Compiled, amd_usage, code_bytes, nvidia_usage


def variant(op: str, **features: str) -> Variant:
    return Variant(op, features, lambda: None)


def grid(op: str) -> list[Variant]:
    return [variant(op, a=a, b=b, c=c) for a, b, c in itertools.product(("a1", "a2", "a3"), ("b1", "b2"), ("c1", "c2"))]


def row(**changes: object) -> Compiled:
    fields = {"chip": "sm_90", "op": "op", "variant": "op x", "kernel": "kernel", "default": True, "warps": 4}
    sizes = {"registers": 40, "shared_bytes": 1024, "spill_bytes": 0, "code_bytes": 2048}
    return Compiled(**{**fields, **sizes, **changes})  # type: ignore[arg-type]


def test_every_pair_of_values_and_every_chip_is_among_the_chosen() -> None:
    given = {"sm_90": grid("one"), "gfx942": [*grid("one"), variant("two", d="d1"), variant("two", d="d2")]}
    selection = select(given, 100)
    names = {name for _, name in selection.chosen if name.startswith("one")}
    for first, second in itertools.combinations((("a1", "a2", "a3"), ("b1", "b2"), ("c1", "c2")), 2):
        for pair in itertools.product(first, second):
            assert any(set(pair) <= set(name.split()) for name in names), pair
    assert {(chip, name.split()[0]) for chip, name in selection.chosen} >= {("sm_90", "one"), ("gfx942", "one")}
    assert {name for _, name in selection.chosen if name.startswith("two")} == {"two d1", "two d2"}
    assert selection.pairs == selection.covered == 6 + 6 + 4 + 2
    assert len(selection.chosen) <= 10


def test_no_more_are_chosen_than_asked_and_what_is_left_out_is_counted() -> None:
    selection = select({"sm_90": grid("one")}, 2)
    assert len(selection.chosen) == 2
    assert selection.covered < selection.pairs == 16


@pytest.mark.parametrize("chip", COMPILED_FOR)
def test_variants_of_a_chip_have_names_of_their_own(chip: str) -> None:
    found = variants(chip)
    names = [variant.name for variant in found]
    assert len(set(names)) == len(names)
    assert any("float8" in name for name in names) == (chip not in ("sm_80", "gfx1100"))


def test_every_folder_of_kernels_lists_its_variants() -> None:
    for folder in FOLDERS:
        assert variants("sm_90", [folder]), folder


def test_what_tools_say_is_read_and_anything_else_refused() -> None:
    said = " Function kernel:\n  REG:144 STACK:16 SHARED:0 LOCAL:8 CONSTANT[0]:640 TEXTURE:0"
    assert nvidia_usage(said) == (144, 24)
    with pytest.raises(ValueError, match=r"names no registers.*'nothing'"):
        nvidia_usage("nothing")
    metadata = ".private_segment_fixed_size: 12\n .sgpr_spill_count: 9\n .vgpr_count:  96\n .vgpr_spill_count: 4\n"
    assert amd_usage(metadata) == (96, 16)
    with pytest.raises(ValueError, match="has only vgpr_count"):
        amd_usage(".vgpr_count: 1")


def test_machine_code_is_what_sections_of_text_hold() -> None:
    names = b"\0.text.kernel\0.data\0.shstrtab\0"
    header = bytearray(64)
    struct.pack_into("<Q", header, 0x28, 64 + len(names))
    struct.pack_into("<HHH", header, 0x3A, 64, 4, 3)
    sections = [(0, 0, 0), (1, 0, 100), (14, 0, 50), (20, 64, len(names))]
    table = b"".join(struct.pack("<IIQQQQ", name, 0, 0, 0, at, size) + bytes(24) for name, at, size in sections)
    assert code_bytes(bytes(header) + names + table) == 100


def test_spills_of_defaults_and_too_much_shared_memory_are_problems() -> None:
    rows = [
        row(),
        row(variant="op spills", spill_bytes=8),
        row(variant="op asked for", spill_bytes=8, default=False),
        row(variant="op large", chip="sm_120", shared_bytes=120_000),
    ]
    assert problems(rows) == [
        "sm_90: op spills (kernel) spills 8 B a thread",
        "sm_120: op large (kernel) takes 120000 B of 101376 B shared",
    ]


def test_tables_hold_every_kernel_and_pages_the_spans() -> None:
    rows = [row(), row(variant="op y", registers=90), row(chip="gfx942", shared_bytes=65536)]
    text = text_table(rows)
    assert text.count("kernel") == 3 + 2
    assert "65,536" in text
    written = page(rows, selection="Three.", compiler="Triton 0")
    assert "| `op` | `kernel` | 2 | 40 – 90 | 1,024 | 0 | 2,048 |" in written
    assert "## gfx942 (MI300X, MI325X)" in written
    assert "Compiled with Triton 0." in written


def compiled(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "cardan_kernels.compiled", "--cache", str(folder / "cache")]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run([*command, *words], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.slow
def test_kernels_are_compiled_for_chips_that_are_not_there_and_not_again(tmp_path: Path) -> None:
    words = ("--chips", "sm_90", "gfx942", "--most", "4", "--workers", "1", "--page", str(tmp_path / "page.md"))
    first = compiled(tmp_path, *words)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "compiled 4 of 4" in first.stderr
    assert "4 of " in first.stdout
    (cache,) = (tmp_path / "cache").glob("*.json")
    rows = [entry for found in json.loads(cache.read_text()).values() for entry in found]
    assert all(entry["registers"] > 0 and entry["code_bytes"] > 0 for entry in rows)
    again = compiled(tmp_path, *words)
    assert again.returncode == 0
    assert "compiled" not in again.stderr
    written = (tmp_path / "page.md").read_text()
    assert written.startswith("# Kernels for GPUs")
    assert "## sm_90 (H100, H200)" in written
    assert "## gfx942 (MI300X, MI325X)" in written
