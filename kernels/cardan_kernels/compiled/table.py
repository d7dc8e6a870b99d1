"""The table of compiled kernels, for terminals and for docs/kernels.md.

It compiles nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from cardan_kernels.chips import CHIPS, COMPILED_FOR
from cardan_kernels.compiled.target import Compiled

COLUMNS = ("variant", "kernel", "warps", "registers", "shared", "spills", "code")
SUMMARY = ("operation", "kernel", "compiled", "registers", "shared", "spills", "code")


def _sizes(row: Compiled) -> tuple[str, ...]:
    return (
        *(row.variant, row.kernel, str(row.warps), str(row.registers)),
        *(f"{row.shared_bytes:,}", f"{row.spill_bytes:,}", f"{row.code_bytes:,}"),
    )


def text_table(rows: Sequence[Compiled]) -> str:
    """All kernels, chip by chip, in columns."""
    lines = []
    for chip in COMPILED_FOR:
        cells = [COLUMNS, *(_sizes(row) for row in _sorted(rows) if row.chip == chip)]
        if len(cells) == 1:
            continue
        widths = [max(len(row[column]) for row in cells) for column in range(len(COLUMNS))]
        lines += ["", f"{chip} ({CHIPS[chip].examples})"]
        for row in cells:
            left = "  ".join(cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True))
            right = "  ".join(cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True))
            lines.append(f"  {left}  {right}")
    return "\n".join(lines)


def summary(rows: Sequence[Compiled], chip: str) -> str:
    """One chip's kernels in Markdown, with the least and the most that their variants take."""
    lines = [_line(SUMMARY), _line(["---", "---", *["--:"] * 5])]
    groups: dict[tuple[str, str], list[Compiled]] = {}
    for row in _sorted(rows):
        if row.chip == chip:
            groups.setdefault((row.op, row.kernel), []).append(row)
    for (op, kernel), members in groups.items():
        numbers = (
            [row.registers for row in members],
            [row.shared_bytes for row in members],
            [row.spill_bytes for row in members],
            [row.code_bytes for row in members],
        )
        lines.append(_line([f"`{op}`", f"`{kernel}`", str(len(members)), *(_span(values) for values in numbers)]))
    return "\n".join(lines)


def page(rows: Sequence[Compiled], *, selection: str, compiler: str) -> str:
    """docs/kernels.md.

    Args:
        rows: what was compiled.
        selection: which variants these are.
        compiler: name and version.
    """
    sections = "\n\n".join(
        f"## {chip} ({CHIPS[chip].examples})\n\n"
        f"A block may have {CHIPS[chip].shared_bytes:,} bytes of shared memory.\n\n{summary(rows, chip)}"
        for chip in COMPILED_FOR
        if any(row.chip == chip for row in rows)
    )
    return PAGE.format(selection=selection, compiler=compiler, sections=sections)


PAGE = """# Kernels for GPUs

The kernels in `kernels/cardan_kernels` are written in Triton, one source for every chip. They are verified twice
without a GPU: their numbers in Triton's interpreter, against float64 references, by the tests in `tests/kernels`; and
their code, compiled for each chip below by `make kernels-compile`, which writes this page. Neither says how fast they
are, and neither is a run on the chip.

{selection} Compiled with {compiler}. `make kernels-compile-all` compiles every variant that a plan can choose, which
takes hours.

A kernel that spills registers in a configuration that plans take by themselves fails the command, and so does one that
takes more shared memory than its chip gives a block. Columns give the least and the most over the compiled variants:
registers of a thread (vector registers on AMD's chips), bytes of shared memory of a block, bytes that a thread spills,
bytes of machine code.

Configurations (sizes of tiles, warps, loads in flight) stand in `kernels/cardan_kernels/tuning/configs`, by chip,
operation and shape; a plan names the one that it uses. A chip without a file of measured numbers takes the default.

{sections}
"""


def _sorted(rows: Sequence[Compiled]) -> list[Compiled]:
    return sorted(rows, key=lambda row: (COMPILED_FOR.index(row.chip), row.op, row.variant, row.kernel))


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} – {high:,}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
