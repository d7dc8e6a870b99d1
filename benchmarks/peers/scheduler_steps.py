"""The scheduler's own time for a decode step, in processes of its own, without a device.

It knows nothing of engines.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from foreign_load import ForeignLoad
from peers.record import MAX_FOREIGN_CORES, MAX_TRIES, Runs


def steps(rows: Sequence[int], enough: int, say: Callable[[str], None], *, quick: bool) -> dict[str, Any]:
    """Medians by number of rows, in the form of a case."""
    runs = {count: Runs() for count in rows}
    tries = 1 if quick else MAX_TRIES
    while not all(found.done(enough, tries) for found in runs.values()):
        load = ForeignLoad()
        load.start()
        measured = _measure(rows)
        foreign = load.stop()
        kept = "kept" if quick or foreign <= MAX_FOREIGN_CORES else "thrown away"
        times = ", ".join(f"{one['rows']} rows {one['total_us']:.0f} µs" for one in measured)
        say(f"    {times}; foreign load {foreign:.2f}, {kept}")
        for one in measured:
            numbers = {name: float(one[name]) for name in ("plan_us", "commit_us", "total_us", "p99_us")}
            runs[one["rows"]].add(numbers, 0.0 if quick else foreign)
    return {f"{count} rows": found.summary(enough) for count, found in runs.items()}


def _measure(rows: Sequence[int]) -> list[dict[str, Any]]:
    cardan = Path(sys.executable).with_name("cardan")
    flags = [word for count in rows for word in ("--rows", str(count))]
    command = [str(cardan), "bench", "scheduler", "--json", "--steps", "400", *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found
