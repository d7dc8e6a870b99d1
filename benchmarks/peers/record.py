"""What was measured, kept case by case, so that a stopped run goes on where it was.

It knows neither engines nor loads.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENOUGH_CLEAN = 3
MAX_TRIES = 12
MAX_FOREIGN_CORES = 0.15
LONG_RUN_S = 45.0
"""A run that takes longer is its own average: one clean one is enough."""


@dataclass(slots=True)
class Runs:
    """Runs of one engine in one case.

    Attributes:
        clean: numbers of the runs that nothing disturbed.
        noisy: how many were thrown away.
        refused: why the engine cannot run it, or None.
        long: whether a run took so long that one clean one is enough.
    """

    clean: list[dict[str, float]] = field(default_factory=list)
    noisy: int = 0
    refused: str | None = None
    long: bool = False

    def done(self, enough: int = ENOUGH_CLEAN, tries: int = MAX_TRIES) -> bool:
        """Whether no further run is needed or allowed."""
        return self.refused is not None or self._has(enough) or len(self.clean) + self.noisy >= tries

    def _has(self, enough: int) -> bool:
        return len(self.clean) >= (1 if self.long else enough)

    def add(self, numbers: dict[str, float], foreign_cores: float) -> bool:
        """Keep a run, or count it as noisy. Returns whether it was kept."""
        if foreign_cores > MAX_FOREIGN_CORES:
            self.noisy += 1
            return False
        self.clean.append(numbers)
        return True

    def summary(self, enough: int = ENOUGH_CLEAN) -> dict[str, Any]:
        """Medians, how they came about, and ``state``: ok, noisy or refused."""
        names = self.clean[0] if self.clean else ()
        medians = {name: statistics.median(run[name] for run in self.clean) for name in names}
        state = "refused" if self.refused is not None else "ok" if self._has(enough) else "noisy"
        counts = {"clean_runs": len(self.clean), "noisy_runs": self.noisy, "long": self.long}
        return {"state": state, "refused": self.refused, **counts, "median": medians, "runs": self.clean}


class Record:
    """The file with all results."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        """Go on with an unfinished file, or keep what a finished one has until it is measured anew.

        What another machine measured is dropped: ratios within one table are of one machine.

        Args:
            path: of the file.
            about: ``machine``, versions and the like; those of the last run are kept in the file.
        """
        self._path = path
        old: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        if old.get("about", {}).get("machine") != about["machine"]:
            old = {}
        self.going_on = bool(old) and not old.get("complete", True)
        self._fresh: list[str] = list(old.get("measured_now", ())) if self.going_on else []
        self.value: dict[str, Any] = {"about": about, "floors": {}, "peers": {}, "cases": {}}
        for part in ("floors", "peers", "cases"):
            self.value[part] = old.get(part, {})
        self.save(complete=False)

    def has(self, case: str) -> bool:
        """Whether this run, or the stopped one that it continues, has measured a case."""
        return case in self._fresh

    def put(self, case: str, engines: dict[str, Any]) -> None:
        """Keep a case; what other engines had stays where this run asked only some."""
        self.value["cases"][case] = {**self.value["cases"].get(case, {}), **engines}
        self._fresh.append(case)
        self.save(complete=False)

    def save(self, *, complete: bool) -> None:
        """Write the file, whole or not at all."""
        self.value["complete"] = complete
        self.value["measured_now"] = [] if complete else self._fresh
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self.value, indent=1) + "\n")
        part.replace(self._path)
