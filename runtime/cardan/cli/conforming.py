"""``cardan conform``: the conformance suite on one installed platform, as a report card and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cardan.cli.terminal import messages, results, set_up_logging
from cardan.platform import Evidence
from cardan.platform.discovery import choose_platform
from cardan.testing.conformance import Report, Status, Subject, collect, run_suite

EXIT_FAILED = 1
BENCHMARK_COLUMNS = 4
EVIDENCE_SHOWN = 8


def conform(
    *,
    platform: Annotated[str, Parameter(help="Name of the platform, as `cardan platforms` lists it.")] = "auto",
    json_file: Annotated[Path | None, Parameter(name="--json", help="Write the report to this file as JSON.")] = None,
    only: Annotated[
        tuple[str, ...], Parameter(name="--only", help="A part of the suite, or the beginning of part/check.")
    ] = (),
    quick: Annotated[bool, Parameter(help="Leave out long lengths and rare shapes.", negative="")] = False,
    platform_option: Annotated[
        tuple[str, ...], Parameter(name="--platform-option", help="An option of the platform's own, name=value.")
    ] = (),
) -> int:
    """Try a platform against float64 references, from single operations to whole engines; exits with 1 on a failure."""
    console = messages()
    set_up_logging("error", console)
    found = choose_platform(platform, options=platform_option, trial=True)
    with Subject(found, quick=quick, options=platform_option) as subject:
        report = _run(subject, only, console)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    show_report(results(), report)
    return 0 if report.passed else EXIT_FAILED


def _run(subject: Subject, only: tuple[str, ...], console: Console) -> Report:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("conformance", total=len(collect(subject, only)))
        return run_suite(
            subject, only, lambda outcome: progress.update(bar, advance=1, description=f"{outcome.part:<12}")
        )


def show_report(console: Console, report: Report) -> None:
    """The report card: counts by part, failures, reasons of skips, evidence, times."""
    level = "no device opened" if report.level is None else f"level {report.level}"
    kind = "quick run" if report.quick else "full run"
    console.print(f"[bold]conformance of {escape(report.platform)}[/], {escape(report.device)}")
    console.print(f"{level}, platform API {report.api}, cardan {report.version}, {kind}, {report.seconds:.0f} s")
    console.print(_counts(report))
    for outcome in report.of(Status.FAILED):
        console.print(f"[bold red]FAILED[/] {escape(outcome.id)}: {escape(outcome.detail)}", soft_wrap=True)
    for reason, checks in report.skips().items():
        named = checks[0] if len(checks) == 1 else f"{len(checks)} checks, such as {checks[0]}"
        console.print(f"[yellow]skipped[/] {escape(named)}: {escape(reason)}", soft_wrap=True)
    _show_evidence(console, report)
    if report.benchmarks:
        console.print(_benchmarks(report))
    totals = ", ".join(f"{len(report.of(status))} {status.value}" for status in Status)
    verdict = "[bold green]conforms[/]" if report.passed else "[bold red]does not conform[/]"
    console.print(f"{escape(report.platform)} {verdict}: {totals}")


def _counts(report: Report) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("part", *(status.value for status in Status)):
        table.add_column(name, justify="left" if name == "part" else "right")
    for part, counts in report.counts().items():
        table.add_row(part, *(str(counts[status.value]) for status in Status))
    return table


def _show_evidence(console: Console, report: Report) -> None:
    for kind in Evidence:
        features = report.evidence.get(kind.value, ())
        if features:
            shown = ", ".join(features[:EVIDENCE_SHOWN]) + (" …" if len(features) > EVIDENCE_SHOWN else "")
            console.print(f"claimed on evidence [bold]{kind.value}[/]: {len(features)} ({escape(shown)})")


def _benchmarks(report: Report) -> Table:
    """Microseconds of each operation, several to a line."""
    table = Table(box=None, pad_edge=False, title="µs a call, results brought to the host", title_justify="left")
    for _ in range(BENCHMARK_COLUMNS):
        table.add_column("operation")
        table.add_column("µs", justify="right")
    cells = [cell for name, micros in report.benchmarks.items() for cell in (name, f"{micros:.0f}")]
    for start in range(0, len(cells), 2 * BENCHMARK_COLUMNS):
        table.add_row(*cells[start : start + 2 * BENCHMARK_COLUMNS])
    return table
