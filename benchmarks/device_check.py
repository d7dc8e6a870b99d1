"""Tries the CUDA platform on this machine's GPU: conformance, waits, graphs, parity, kernels, throughput.

It needs no network. ``--collect FOLDER`` prepares, on a machine that has one, the wheels that it needs beyond torch and
triton; ``--wheels FOLDER`` uses them, in a folder of its own, on the machine with the GPU. What it finds is written
part by part, so that a run which is stopped keeps what it had. ``--emulated`` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform as host
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "docs" / "evidence"
REFUSED = 2
QUICK_S, WHOLE_S = 170, 470
GIVEN = ("torch", "triton", "numpy")
"""What an image for GPUs has; everything else travels."""

LIBRARIES = ("cardan", "torch", "triton", "numpy", "flashinfer-python", "transformers", "vllm", "sglang")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="done in 3 minutes; without it in 8")
    parser.add_argument("--seconds", type=float, help="time for everything, instead")
    parser.add_argument("--parts", nargs="*", choices=tuple(PARTS), default=tuple(PARTS), help="only these")
    parser.add_argument("--folder", type=Path, help="where the report goes; docs/evidence by default")
    parser.add_argument("--wheels", type=Path, help="install what is missing from this folder, for this run only")
    parser.add_argument("--collect", type=Path, help="fetch wheels for --wheels into this folder, and end")
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU, for --collect")
    parser.add_argument("--emulated", action="store_true", help="the stand-in for a GPU; what is written says so")
    return parser.parse_args(arguments)


def collect(folder: Path, python: str) -> list[list[str]]:
    """Commands that fetch wheels for a Linux machine with another Python."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [need for need in project["dependencies"] if re.split(r"[^a-z0-9-]", need)[0] not in GIVEN]
    pip = [sys.executable, "-m", "pip"]
    target = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    target += [word for tag in ("manylinux_2_28", "manylinux2014") for word in ("--platform", f"{tag}_x86_64")]
    return [
        [*pip, "download", "-q", "-d", str(folder), *target, "-c", str(ROOT / "constraints.txt"), *needed],
        [*pip, "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)],
    ]


def install(wheels: Path, target: Path) -> list[str]:
    """The command that puts the wheels into a folder of their own, but for what the image has."""
    files = [str(file) for file in sorted(wheels.glob("*.whl")) if file.name.partition("-")[0] not in GIVEN]
    return [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(target), *files]


def machine(flags: argparse.Namespace) -> dict[str, Any]:
    """What was tried, and on what."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    (info, *_) = chosen(flags).devices()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": f"{info.name}, {info.detail}",
        "memory_gib": round((info.total_memory or 0) / 2**30, 1),
        "host": f"{host.system()} {host.machine()}, Python {host.python_version()}, {os.cpu_count()} CPUs",
        "versions": versions,
        "emulated": flags.emulated,
        "quick": flags.quick,
    }


def options_of(flags: argparse.Namespace) -> tuple[str, ...]:
    """Options of the platform."""
    return ("device=emulated", "cuda_graph_max_bs_decode=2") if flags.emulated else ()


def chosen(flags: argparse.Namespace) -> Any:
    """The platform, configured."""
    from cardan.platform.discovery import choose_platform
    from cardan.platform.refusals import parse_options

    found = choose_platform("cuda", options=options_of(flags), trial=True)
    return found.configured(parse_options(options_of(flags), found.options(), "cuda"))


def part_waits(flags: argparse.Namespace, clock: Any) -> dict[str, Any]:
    """Decode steps between whose launch and result nothing may wait, as CUDA itself sees it."""
    from device_engine import Run, prompts
    from device_parts import folder_of, open_engine

    guard = no_waiting(flags)
    with tempfile.TemporaryDirectory() as folder:
        shape = folder_of("tiny", Path(folder))
        settings = {"max_running_requests": 2, "context_length": 64, "dtype": "float32"}
        run = Run(open_engine(chosen(flags), shape, settings, options_of(flags)))
        launch = run.prepared.runner.launch
        watched = {"steps": 0}

        def launched(batch: Any) -> Any:
            if str(batch.mode) != "decode":
                return launch(batch)
            watched["steps"] += 1
            with guard():
                step = launch(batch)
            sample = step.sample

            def sampled(*args: Any, **kwargs: Any) -> None:
                with guard():
                    sample(*args, **kwargs)

            step.sample = sampled
            return step

        run.prepared.runner.launch = launched  # type: ignore[method-assign]
        try:
            run.ask(prompts(2, 5, 97), 4, clock)
        finally:
            run.close()
    return {"decode_steps": watched["steps"], "passed": watched["steps"] > 0}


def no_waiting(flags: argparse.Namespace) -> Callable[[], Any]:
    """A context in which waiting raises."""
    if flags.emulated:
        from cardan_torch.gpu.emulation import no_waiting as rules

        return lambda: rules("between launch and result")
    from contextlib import contextmanager

    import torch

    @contextmanager
    def strict() -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return strict


def part_parity(flags: argparse.Namespace, clock: Any) -> dict[str, Any]:
    """Greedy tokens in float32 against torch on the CPU: of made-up weights, and of SmolLM2 where it is there."""
    from device_engine import parity
    from device_parts import folder_of

    sizes = {"rows": 2, "prompt": 4, "new": 3} if flags.emulated else {"rows": 4, "prompt": 48, "new": 32}
    where = {**sizes, "options": options_of(flags)}
    models = os.environ.get("CARDAN_TEST_MODELS")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        shape = "tiny" if flags.emulated else "small"
        found[f"{shape}, weights made up"] = parity(chosen(flags), folder_of(shape, Path(folder)), where, clock)
    smollm2 = Path(models or "") / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if models and smollm2.is_file() and not flags.emulated:
        found["SmolLM2-135M Q4_1"] = parity(chosen(flags), smollm2, where, clock)
    found["passed"] = all(way["passed"] for model in list(found.values()) for way in model.values())
    return found


def part_conformance(flags: argparse.Namespace, clock: Any) -> dict[str, Any]:
    """The suite, as far as the time goes; graphs first, since they are what a GPU alone can show."""
    from cardan.testing.conformance import Subject, collect, run_check

    with Subject(chosen(flags), quick=True, options=options_of(flags)) as subject:
        first = ("graph", "capabilities", "memory", "ops", "attention", "linear", "sampler", "kv", "end_to_end")
        checks = sorted(collect(subject), key=lambda check: first.index(check.part))
        outcomes = []
        for check in checks:
            if clock.left_s <= 0:
                break
            outcomes.append(run_check(subject, check))
    counts = {kind: sum(o.status.value == kind for o in outcomes) for kind in ("passed", "failed", "skipped")}
    failed = {o.id: o.detail[:400] for o in outcomes if o.status.value == "failed"}
    return {**counts, "not_reached": len(checks) - len(outcomes), "failures": failed, "passed": not failed}


def part_kernels(flags: argparse.Namespace, clock: Any) -> dict[str, Any]:
    """Times of kernels; there are none without a GPU."""
    if flags.emulated:
        return {"left_out": "kernels are timed on a GPU only"}
    from device_kernels import measure

    return measure(clock)


def part_throughput(flags: argparse.Namespace, clock: Any) -> dict[str, Any]:
    """Prefill and decode of made-up models, against other engines that are installed."""
    from device_engine import measure
    from device_parts import OutOfTimeError
    from device_peers import peers

    batches, prompt, new = ((1, 2), 4, 3) if flags.emulated else ((1, 8, 64, 256), 256, 64 if flags.quick else 128)
    shapes = ("tiny",) if flags.emulated else ("qwen3-0.6b", "llama-8b")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        where = {"folder": Path(folder), "options": options_of(flags), "batches": batches, "prompt": prompt, "new": new}
        for index, shape in enumerate(shapes):
            share = clock.part(1 / (len(shapes) - index))
            try:
                found[shape] = {"cardan": measure(chosen(flags), shape, where, share.part(0.5))}
            except OutOfTimeError:
                found[shape] = {"cardan": {"error": "the time was used up"}}
            found[shape] |= {} if flags.emulated else peers(shape, where, share)
    return found


PARTS: dict[str, tuple[Callable[[argparse.Namespace, Any], dict[str, Any]], float]] = {
    "waits": (part_waits, 0.2),
    "parity": (part_parity, 0.3),
    "kernels": (part_kernels, 0.25),
    "throughput": (part_throughput, 0.6),
    "conformance": (part_conformance, 1.0),
}
"""Each part with the share that it may take of the time that is left."""


def check(flags: argparse.Namespace, file: Path) -> dict[str, Any]:
    """Run the parts, and write what is known after each."""
    from device_parts import Clock, OutOfTimeError

    clock = Clock.of(flags.seconds or (QUICK_S if flags.quick else WHOLE_S))
    report: dict[str, Any] = {"machine": machine(flags), "parts": {}}
    for name, (run, share) in PARTS.items():
        if name not in flags.parts:
            continue
        part = clock.part(share)
        before_s = clock.left_s
        try:
            found = run(flags, part)
        except OutOfTimeError:
            found = {"passed": False, "error": "the time was used up"}
        except Exception as error:  # noqa: BLE001 - a part that breaks is part of the report
            found = {"passed": False, "error": f"{type(error).__name__}: {error}"[:2000]}
        report["parts"][name] = {**found, "seconds": round(before_s - clock.left_s, 1)}
        report["passed"] = all(found.get("passed", True) for found in report["parts"].values())
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def table(report: dict[str, Any]) -> str:
    """A line for each part, and those that people look for first."""
    lines = [report["machine"]["device"]]
    for name, found in report["parts"].items():
        state = "passed" if found.get("passed", True) else "FAILED"
        lines.append(f"{name:<12} {state:<7} {found['seconds']:>6.1f} s  {found.get('error', '')}".rstrip())
    kernels = report["parts"].get("kernels", {})
    for name, value in {**kernels.get("ceilings", {}), **kernels.get("kernels", {})}.items():
        shown = value if isinstance(value, float) else ", ".join(f"{key} {number:.1f}" for key, number in value.items())
        lines.append(f"  {name:<28} {shown}")
    for shape, engines in report["parts"].get("throughput", {}).items():
        for engine, found in engines.items() if isinstance(engines, dict) else ():
            for rows, speeds in found.get("batches", {}).items():
                rates = ", ".join(f"{key} {value}" for key, value in speeds.items())
                lines.append(f"  {shape} {engine} {rows} rows: {rates}")
    return "\n".join(lines)


def file_name(device: str) -> str:
    """The report's name, by the GPU."""
    return "gpu-" + re.sub(r"[^a-z0-9]+", "-", device.partition(",")[0].lower()).strip("-") + ".json"


def run_with_wheels(flags: argparse.Namespace, arguments: list[str]) -> int:
    """Start again where the wheels are found first."""
    with tempfile.TemporaryDirectory(prefix="cardan-wheels-") as target:
        subprocess.run(install(flags.wheels, Path(target)), check=True)
        place = arguments.index("--wheels")
        rest = arguments[:place] + arguments[place + 2 :]
        environment = {**os.environ, "PYTHONPATH": target + os.pathsep + os.environ.get("PYTHONPATH", "")}
        return subprocess.run([sys.executable, __file__, *rest], env=environment, check=False).returncode


def main(arguments: list[str]) -> int:
    """The check; 0 where everything passed, 1 where something did not, 2 where it cannot run."""
    flags = parse(arguments)
    if flags.collect:
        flags.collect.mkdir(parents=True, exist_ok=True)
        for command in collect(flags.collect, flags.python):
            subprocess.run(command, check=True)
        return 0
    if flags.wheels:
        return run_with_wheels(flags, arguments)
    if flags.emulated:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if flags.emulated and flags.folder is None:
        sys.stderr.write("--emulated gives no evidence for docs/evidence. Name another place with --folder.\n")
        return REFUSED
    from cardan.errors import CardanError

    try:
        device = machine(flags)["device"]
    except CardanError as error:
        sys.stderr.write(f"{error}\n")
        return REFUSED
    folder = flags.folder or EVIDENCE
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / file_name(device)
    report = check(flags, file)
    sys.stdout.write(f"{table(report)}\n{file}\n")
    return 0 if report.get("passed", True) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
