"""``python -m cardan_kernels.compiled``: compile the kernels for every chip, print the table, write docs/kernels.md.

It knows no kernel.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

from cardan_kernels.chips import COMPILED_FOR
from cardan_kernels.compiled.pairwise import Selection, select
from cardan_kernels.compiled.run import all_variants, compile_all, problems
from cardan_kernels.compiled.table import page, text_table

MOST = 150
"""Variants that are compiled in each change."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile; returns the exit status, 1 where something does not compile or fit."""
    options = _options(arguments)
    found = all_variants(options.chips)
    total = sum(len(of_chip) for of_chip in found.values())
    if options.all:
        chosen = tuple((chip, variant.name) for chip, of_chip in found.items() for variant in of_chip)
        said = f"All {total:,} variants."
    else:
        selection = select(found, options.most)
        chosen, said = selection.chosen, _said(selection, total)
    began = time.monotonic()
    try:
        rows = compile_all(chosen, options.cache, options.workers, _progress)
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    compiler = f"Triton {version('triton')}"
    sys.stdout.write(f"{text_table(rows)}\n\n{said} {len(rows)} kernels, {time.monotonic() - began:.0f} s.\n")
    wrong = problems(rows)
    sys.stdout.writelines(f"{problem}\n" for problem in wrong)
    if options.page is not None and not wrong:
        options.page.write_text(page(rows, selection=said, compiler=compiler))
    return 1 if wrong else 0


def _said(selection: Selection, total: int) -> str:
    return (
        f"{len(selection.chosen)} of {total:,} variants, with {selection.covered:,} of {selection.pairs:,} pairs of "
        "two features' values, each operation on each chip."
    )


def _progress(done: int, total: int) -> None:
    sys.stderr.write(f"\rcompiled {done} of {total}" + ("\n" if done == total else ""))
    sys.stderr.flush()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m cardan_kernels.compiled", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every variant, not only few with most pairs of features")
    parser.add_argument("--most", type=int, default=MOST, help="variants to compile at most")
    parser.add_argument("--chips", nargs="+", default=list(COMPILED_FOR), choices=COMPILED_FOR)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cache", type=Path, default=Path(".cardan/kernels"))
    parser.add_argument("--page", type=Path, help="file to write the table to, in Markdown")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
