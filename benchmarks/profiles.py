"""Where the time of a step goes, for the models of the comparison with other engines.

It runs ``cardan bench profile``, keeps what that wrote in benchmarks/results/profiles.json, and writes a section of
docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from foreign_load import ForeignLoad
from performance_page import RESULTS, machine, write_section

from cardan.config import cache_dir

FILE = RESULTS / "profiles.json"
CARDAN = str(Path(sys.executable).with_name("cardan"))
SHOWN = 6
MODELS = {
    "SmolLM2-135M, Q4_1": "models/SmolLM2-135M-Instruct.Q4_1.gguf",
    "SmolLM2-135M, bf16": "peers/models/smollm2-135m-bf16",
    "Qwen3-0.6B shape, bf16": "peers/models/qwen3-0.6b-shape-bf16",
    "Qwen3-0.6B shape, Q4_1": "peers/models/qwen3-0.6b-shape.Q4_1.gguf",
}
"""Models under the cache's folder; ``make bench-peers`` makes them."""


def measure(path: Path) -> dict[str, Any]:
    """The profile of one model, with the load of others meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "profile.json"
        flags = ["--dtype", "bfloat16", "--context-length", "2048", "--max-total-tokens", "8192", "--rows", "1"]
        load = ForeignLoad()
        load.start()
        command = [CARDAN, "bench", "profile", "--model", str(path), *flags, "--rows", "8", "--output-json", str(file)]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        return {"foreign_cores": load.stop(), **json.loads(file.read_text())}


def render(results: dict[str, Any]) -> str:
    """The section of docs/performance.md."""
    lines = [
        "## Where the time goes",
        "",
        f"{results['machine']}; from `cardan bench profile`, which runs steps eagerly and times every op, so that a "
        "step takes a little longer here. A captured step saves most of what the host's launch takes.",
    ]
    for title, found in results["models"].items():
        for one in found["profiles"]:
            lines += ["", f"**{title}**, {_kind(one)} (foreign load {found['foreign_cores']:.2f} cores)", ""]
            lines += ["| part | calls | µs | share | GB/s | GFLOP/s |", "|---|---|---|---|---|---|"]
            lines += [
                f"| {op['name']} | {op['calls']:g} | {op['us']:.0f} | {op['share']:.1%} | "
                f"{_rate(op['gb_s'])} | {_rate(op['gflop_s'])} |"
                for op in one["ops"][:SHOWN]
            ]
            rest_us = sum(op["us"] for op in one["ops"][SHOWN:])
            parts = {"other ops": rest_us, **{f"host: {name}": us for name, us in one["host"].items()}}
            lines += [f"| {name} | | {us:.0f} | {us / one['step_us']:.1%} | | |" for name, us in parts.items()]
    return "\n".join([*lines, ""])


def _kind(one: dict[str, Any]) -> str:
    what = f"prefill of {one['tokens']}" if one["kind"] == "prefill" else f"decode of {one['rows']}"
    return f"{what}: {one['step_us'] / 1000:.1f} ms, {one['untimed_us'] / 1000:.1f} without timing each op"


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.1f}"


def main() -> int:
    """Measure, or with ``--render`` write the page from the results that are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--render", action="store_true", help="write docs/performance.md from the last results")
    if not parser.parse_args().render:
        results = {"machine": machine(), "models": {}}
        for title, place in MODELS.items():
            path = cache_dir() / place
            if not path.exists():
                sys.stderr.write(f"{title}: {path} is not there; make bench-peers makes it\n")
                continue
            sys.stderr.write(f"profile: {title}\n")
            results["models"][title] = measure(path)
        FILE.write_text(json.dumps(results, indent=1) + "\n")
    write_section("profiles", render(json.loads(FILE.read_text())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
