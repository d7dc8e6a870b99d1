"""Tries MLX on this Mac: conformance, greedy tokens against recorded ones, a few times.

It writes docs/evidence/mac-<chip>.json and needs no torch. ``--cpu-build`` runs the same on MLX's CPU build, to try the
script, and writes to a folder that must be named.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from greedy_tokens import PROMPTS, TOKENS, compare, continue_greedily, recorded

from cardan_mlx.memory import describe_device, has_metal

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "docs" / "evidence"
CARDAN = str(Path(sys.executable).with_name("cardan"))
REFUSED = 2


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="SmolLM2-135M-Instruct Q4_1: a path, or the alias")
    parser.add_argument("--folder", type=Path, help="where the file goes; docs/evidence by default")
    parser.add_argument("--cpu-build", action="store_true", help="run on MLX's CPU build; what it writes says so")
    parser.add_argument("--quick", action="store_true", help="a few checks, prompts and tokens; what it writes says so")
    return parser.parse_args(arguments)


def refusal(flags: argparse.Namespace) -> str | None:
    """Why this machine or these flags give no evidence, or None."""
    if (flags.cpu_build or flags.quick) and flags.folder is None:
        return "--cpu-build and --quick give no evidence for docs/evidence. Name another place with --folder."
    if not flags.cpu_build and not has_metal():
        return f"this needs a Mac with Metal, and here is {platform.system()} {platform.machine()}. Run it on a Mac."
    return None


def conformance(*, quick: bool) -> dict[str, Any]:
    """The report of ``cardan conform``."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        some = ["--quick", "--only", "capabilities", "--only", "memory"] if quick else []
        subprocess.run([CARDAN, "conform", "--platform", "mlx", "--json", str(file), *some], check=False)
        if not file.is_file():
            return {"passed": False, "error": "cardan conform ended without a report"}
        report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return report


def times(model: str, rows: int, *, quick: bool) -> dict[str, Any]:
    """The report of ``cardan bench`` for some rows at once."""
    lengths = (16, 4) if quick else (512, 128)
    sizes = ["--num-prompts", str(rows), "--random-input-len", str(lengths[0]), "--random-output-len", str(lengths[1])]
    limits = ["--max-total-tokens", "8192", "--max-running-requests", "8"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.json"
        command = [CARDAN, "bench", "--platform", "mlx", "--model", model, *sizes, *limits, "--output-json", str(file)]
        done = subprocess.run(command, check=False)
        if done.returncode or not file.is_file():
            return {"passed": False, "error": f"cardan bench ended with {done.returncode}"}
        report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return report


def machine() -> dict[str, Any]:
    """What was tried, and on what."""
    device = describe_device()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "chip": device.name,
        "device": device.detail,
        "memory_bytes": device.total_memory,
        "metal": has_metal(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "mlx": version("mlx"),
        "cardan": version("cardan"),
        "commit": commit.stdout.strip() or None,
        "date": datetime.now(UTC).date().isoformat(),
    }


def file_name(chip: str) -> str:
    """``mac-<chip>.json``, in small letters and hyphens."""
    return f"mac-{re.sub(r'[^a-z0-9]+', '-', chip.lower()).strip('-')}.json"


def main(arguments: list[str]) -> int:
    """Run all and write the file; returns the exit code."""
    flags = parse(arguments)
    why_not = refusal(flags)
    if why_not:
        sys.stderr.write(f"mac-check: {why_not}\n")
        return REFUSED
    count, tokens = (2, 4) if flags.quick else (len(PROMPTS), TOKENS)
    found: dict[str, Any] = {**machine(), "quick": flags.quick, "conformance": conformance(quick=flags.quick)}
    got = continue_greedily("mlx", flags.model, PROMPTS[:count], tokens)
    found["greedy"] = compare(got, recorded()[:count])
    found["times"] = {f"{rows} rows": times(flags.model, rows, quick=flags.quick) for rows in (1, 8)}
    parts = [found["conformance"], found["greedy"], *found["times"].values()]
    found["passed"] = all(part.get("passed", True) for part in parts)
    folder = flags.folder or EVIDENCE
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(found["chip"])
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(f"mac-check: {'passed' if found['passed'] else 'FAILED'}; wrote {path}\n")
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
