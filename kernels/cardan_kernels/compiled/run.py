"""Compiles many variants in several processes, keeps what came of them, and tells what does not fit its chip.

It knows no kernel and prints nothing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from cardan_kernels.chips import CHIPS, COMPILED_FOR
from cardan_kernels.compiled.target import Compiled, compile_variant
from cardan_kernels.compiled.variant import Variant, variants

Chosen = Sequence[tuple[str, str]]
Progress = Callable[[int, int], None]


def all_variants(chips: Sequence[str] = COMPILED_FOR) -> Mapping[str, tuple[Variant, ...]]:
    """Every variant of each chip."""
    return {chip: variants(chip) for chip in chips}


def source_hash() -> str:
    """Changes with any source or configuration of the kernels, and with the compiler."""
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256(f"{version('triton')}".encode())
    for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.json"))):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def compile_all(chosen: Chosen, cache: Path, workers: int, progress: Progress) -> list[Compiled]:
    """Compile variants, but for those that were compiled from the same sources.

    Args:
        chosen: chip and name of each.
        cache: folder that results and binaries are kept in.
        workers: processes.
        progress: called with how many are done, and of how many.

    Raises:
        RuntimeError: one does not compile; the message says which.
    """
    rows = cache / f"{source_hash()[:32]}.json"
    known: dict[str, list[dict[str, object]]] = json.loads(rows.read_text()) if rows.is_file() else {}
    missing = [(chip, name) for chip, name in chosen if f"{chip} {name}" not in known]
    if missing:
        cache.mkdir(parents=True, exist_ok=True)
        try:
            _compile_missing(missing, cache, workers, known, progress)
        finally:
            rows.write_text(json.dumps(known))
    return [Compiled(**row) for chip, name in chosen for row in known[f"{chip} {name}"]]  # type: ignore[arg-type]


def _compile_missing(
    missing: Chosen, cache: Path, workers: int, known: dict[str, list[dict[str, object]]], progress: Progress
) -> None:
    os.environ["TRITON_CACHE_DIR"] = str(cache / "triton")
    os.environ.pop("TRITON_INTERPRET", None)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting = {pool.submit(_compile_one, chip, name): (chip, name) for chip, name in missing}
        for count, future in enumerate(as_completed(waiting), 1):
            chip, name = waiting[future]
            error = future.exception()
            if error is not None:
                pool.shutdown(cancel_futures=True)
                raise RuntimeError(f"{name} does not compile for {chip}: {error}") from error
            known[f"{chip} {name}"] = [asdict(row) for row in future.result()]
            progress(count, len(missing))


@functools.cache
def _variants_of(chip: str) -> Mapping[str, Variant]:
    return {variant.name: variant for variant in variants(chip)}


def _compile_one(chip: str, name: str) -> tuple[Compiled, ...]:
    return compile_variant(_variants_of(chip)[name], CHIPS[chip])


def problems(rows: Sequence[Compiled]) -> list[str]:
    """What does not fit: spills of what plans take by themselves, and more shared memory than a chip has."""
    found = []
    for row in rows:
        limit = CHIPS[row.chip].shared_bytes
        if row.shared_bytes > limit:
            found.append(f"{row.chip}: {row.variant} ({row.kernel}) takes {row.shared_bytes} B of {limit} B shared")
        if row.spill_bytes and row.default:
            found.append(f"{row.chip}: {row.variant} ({row.kernel}) spills {row.spill_bytes} B a thread")
    return found
