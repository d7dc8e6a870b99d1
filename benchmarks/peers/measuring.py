"""Measures the cases of a group: engines alternate, disturbed runs are thrown away, time is bounded.

It knows no page and no set-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from foreign_load import ForeignLoad
from peers.cases import GROUPS, LLAMA_BENCH_LOADS, LOADS, Group, Load, takes
from peers.engines import KINDS, Engine, EngineError, Launch, Server, llama_bench, process_tree, pss_bytes
from peers.models import ModelFiles
from peers.record import ENOUGH_CLEAN, LONG_RUN_S, MAX_TRIES, Record, Runs

MB = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How it is measured.

    Attributes:
        engines: that take part.
        cases: ``group/load`` that are wanted.
        root: folder of the peers' environments, logs too.
        refused: engines that could not be set up, and why.
        threads: that compute.
        deadline_s: on the monotonic clock; no run begins after it.
        quick: one short run each, whatever disturbs it.
        say: told what is next.
    """

    engines: tuple[str, ...]
    cases: tuple[str, ...]
    root: Path
    refused: Mapping[str, str]
    threads: int
    deadline_s: float
    quick: bool
    say: Callable[[str], None]

    @property
    def enough(self) -> int:
        """Clean runs that are wanted."""
        return 1 if self.quick else ENOUGH_CLEAN

    @property
    def tries(self) -> int:
        """Most runs, disturbed ones included."""
        return 1 if self.quick else MAX_TRIES

    def load(self, name: str) -> Load:
        """A load, shorter where it has to be quick."""
        load = LOADS[name]
        if not self.quick:
            return load
        length = 64 if load.input_len == 512 else min(load.input_len, 1088)
        return replace(load, input_len=length, output_len=min(load.output_len, 5))


class OutOfTime(Exception):  # noqa: N818 - it is no error
    """The time that was allowed is over."""


@dataclass(slots=True)
class GroupRun:
    """The engines of one group while it is measured."""

    name: str
    files: ModelFiles
    settings: Settings
    record: Record
    alive: dict[str, Engine] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    largest_pss: dict[str, int] = field(default_factory=dict)
    starts: dict[str, Runs] = field(default_factory=dict)
    slow: set[str] = field(default_factory=set)
    beyond_mb: float | None = None

    @property
    def group(self) -> Group:
        """What is measured."""
        return GROUPS[self.name]

    def wanted(self) -> list[str]:
        """Loads that are still to be measured, in order."""
        cases = [f"{self.name}/{load}" for load in self.group.loads]
        return [case.split("/")[1] for case in cases if case in self.settings.cases and not self.record.has(case)]

    def measure(self) -> None:
        """Measure everything that is wanted.

        Raises:
            OutOfTime: no further run may begin.
        """
        wanted = self.wanted()
        if not wanted:
            return
        try:
            self._start_all(wanted)
            for load in wanted:
                if LOADS[load].run is not None:
                    self._measure_load(load)
            if "memory" in wanted:
                self._put_memory()
        finally:
            for engine in self.alive.values():
                engine.close()

    def _engines(self) -> list[str]:
        return [name for name in self.group.forms if name in self.settings.engines]

    def _launch(self, name: str) -> Launch:
        log = self.settings.root / "logs" / f"{self.name}-{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        return Launch(self.files.path(self.group.forms[name]), self.settings.root, self.settings.threads, log)

    def _start_all(self, wanted: list[str]) -> None:
        """Start every engine; where starts are measured, end and start them again, one after the other."""
        self.refused = {name: self.settings.refused[name] for name in self._engines() if name in self.settings.refused}
        if wanted == ["start"] or "start" in wanted:
            names = [name for name in self._engines() if name in KINDS and takes(name, "start")]
            self.starts = {name: Runs(refused=self.refused.get(name)) for name in names}
            while not all(runs.done(self.settings.enough, self.settings.tries) for runs in self.starts.values()):
                for name, runs in self.starts.items():
                    if not runs.done(self.settings.enough, self.settings.tries):
                        self._start(name, runs)
            self._put("start", {name: runs.summary(self.settings.enough) for name, runs in self.starts.items()})
        for name in self._engines():
            needed = name in KINDS and any(takes(name, load) for load in wanted)
            if needed and name not in self.alive and name not in self.refused:
                self._start(name, Runs())

    def _start(self, name: str, runs: Runs) -> None:
        self._check_time()
        if name in self.alive:
            self.alive.pop(name).close()
        self.settings.say(f"{self.name}: starting {name}")
        load = ForeignLoad()
        load.start()
        try:
            engine = KINDS[name].start(self._launch(name))
        except (EngineError, OSError) as error:
            self.refused[name] = runs.refused = f"does not start: {error}"
            self.settings.say(f"{self.name}: {name} {runs.refused}")
            return
        runs.long = engine.start_s > LONG_RUN_S
        self._add(runs, {"start_s": engine.start_s}, load.stop())
        self.alive[name] = engine
        if name == "cardan" and isinstance(engine, Server):
            # No request has touched the KV pool yet, so what is there beyond the weights is the engine's own.
            plan = engine.get("/server_info")["plan"]
            self.beyond_mb = (pss_bytes(engine.process) - weight_bytes(plan)) / MB

    def _add(self, runs: Runs, numbers: dict[str, float], foreign_cores: float) -> None:
        kept = runs.add(numbers, 0.0 if self.settings.quick else foreign_cores)
        values = ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())
        self.settings.say(f"    {values}; foreign load {foreign_cores:.2f}{'' if kept else ', thrown away'}")

    def _measure_load(self, name: str) -> None:
        load = self.settings.load(name)
        runs = {engine: Runs(refused=self.refused.get(engine)) for engine in self._engines() if takes(engine, name)}
        for engine in runs:
            if engine in self.alive:  # its first run of this kind may prepare something
                self._check_time()
                self._run(engine, name, self._warm_up(engine, load), 999_999, Runs())
        for seed in range(self.settings.tries):
            for engine, found in runs.items():
                if not found.done(self.settings.enough, self.settings.tries):
                    self._check_time()
                    self._run(engine, name, load, seed, found)
        self._put(name, {engine: found.summary(self.settings.enough) for engine, found in runs.items()})

    def _warm_up(self, engine: str, load: Load) -> Load:
        """A load cut short: by its answers, and for a slow engine to one request."""
        requests = 1 if engine in self.slow else load.requests
        return replace(load, requests=requests, output_len=min(load.output_len, 4))

    def _run(self, engine: str, name: str, load: Load, seed: int, runs: Runs) -> None:
        self.settings.say(f"{self.name}: {load.title}, {engine}")
        started_s = time.monotonic()
        try:
            if engine == "llama-bench":
                foreign = ForeignLoad(measured=())
                foreign.start()
                sizes = LLAMA_BENCH_LOADS[name]
                numbers = {"tok_s": llama_bench(self._launch(engine), *sizes)}
            else:
                alive = self.alive[engine]
                foreign = ForeignLoad(measured=(psutil.Process(alive.process.pid),))
                foreign.start()
                assert load.run is not None
                numbers = load.run(alive, load, seed)
        except (EngineError, OSError, psutil.Error, ValueError) as error:
            runs.refused = f"failed: {error}"
            self.settings.say(f"    {engine} {runs.refused}")
            return
        self._add(runs, numbers, foreign.stop())
        if time.monotonic() - started_s > LONG_RUN_S:
            runs.long = True
            self.slow.add(engine)
        if engine in self.alive:
            seen = pss_bytes(self.alive[engine].process)
            self.largest_pss[engine] = max(self.largest_pss.get(engine, 0), seen)

    def _put_memory(self) -> None:
        found: dict[str, Any] = {}
        for name in self._engines():
            if name in KINDS and takes(name, "memory"):
                runs = Runs(refused=self.refused.get(name))
                if name in self.largest_pss:
                    numbers = {"pss_mb": self.largest_pss[name] / MB}
                    if name == "cardan" and self.beyond_mb is not None:
                        numbers["beyond_mb"] = self.beyond_mb
                    runs.clean.append(numbers)
                found[name] = {**runs.summary(1), "processes": len(self._tree(name))}
        self._put("memory", found)

    def _tree(self, name: str) -> list[psutil.Process]:
        return process_tree(self.alive[name].process) if name in self.alive else []

    def _put(self, load: str, engines: dict[str, Any]) -> None:
        self.record.put(f"{self.name}/{load}", engines)

    def _check_time(self) -> None:
        if time.monotonic() > self.settings.deadline_s:
            raise OutOfTime


def weight_bytes(plan: Mapping[str, Any]) -> int:
    """Bytes of weights, as a plan lists them."""
    return sum(int(line["bytes"]) for line in plan["memory"] if line["what"] == "weights")
