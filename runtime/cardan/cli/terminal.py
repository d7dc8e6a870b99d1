"""How things look in the terminal: plans, platforms, benchmark reports, progress, errors.

It gets plain data and decides nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from cardan.platform.report import CapabilityRow, PlanRow, PlatformRow, format_bytes

PLAIN_WIDTH = 160
"""Columns where the output is no terminal."""

_STATE_STYLES = {"usable": "green", "not here": "yellow", "broken": "red"}
_SUPPORT_STYLES = {"native": "green", "emulated": "yellow", "unsupported": "red"}


def results() -> Console:
    """Where results go: standard output."""
    return _console(stderr=False)


def messages() -> Console:
    """Where everything but results goes: standard error, so that output can be piped."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def show_error(error: BaseException) -> None:
    """One clear message on standard error."""
    messages().print(f"[bold red]error:[/] {escape(str(error) or type(error).__name__)}", soft_wrap=True)


def set_up_logging(level: str, console: Console) -> None:
    """Send the log of this process to a console."""
    handler = RichHandler(console=console, show_path=level == "debug", omit_repeated_times=False, markup=False)
    logging.basicConfig(level=level.upper(), format="%(message)s", datefmt="%H:%M:%S", handlers=[handler], force=True)


def show_plan(console: Console, plan: Mapping[str, Any]) -> None:
    """Show a plan in the form of ``plan_to_json``."""
    model, device = plan["model"], plan["device"]
    detail = f" ({device['detail']})" if device.get("detail") else ""
    console.print(f"[bold]platform[/] {plan['platform']}, {escape(device['name'] + detail)}")
    console.print(
        f"[bold]model[/]    {escape(model['name'])}: {model['architecture']}, {model['num_layers']} layers, "
        f"{model['num_parameters'] / 1e6:,.0f}M parameters, {format_bytes(model['weight_bytes'])}"
    )
    why = f"`cardan platforms {plan['platform']}` describes it"
    options = [
        PlanRow(f"option {name}", str(value), "platform", why) for name, value in plan["platform_options"].items()
    ]
    settings = [
        PlanRow(name, _value_text(item["value"]), item["source"], item["why"])
        for name, item in plan["settings"].items()
    ]
    console.print(_table(("setting", "value", "source", "why"), [_cells(row) for row in [*settings, *options]]))
    formats = [
        (item["fmt"], f"{item['tensors']} tensors", "native" if item["native"] else "widened", item["why"])
        for item in plan["formats"]
    ]
    if formats:
        console.print(_table(("weights", "", "", ""), formats))
    show_memory(console, plan["memory"])
    for note in plan["notes"]:
        console.print(f"[yellow]note:[/] {escape(note)}")


def show_memory(console: Console, lines: Iterable[Mapping[str, Any]]) -> None:
    """Show the sums that led to the size of the KV pool."""
    rows = [(line["what"], format_bytes(line["bytes"]), line["why"]) for line in lines]
    if rows:
        console.print(_table(("memory", "", "why"), rows))


def show_platforms(console: Console, rows: Sequence[PlatformRow]) -> None:
    """Show the installed platforms."""
    table = Table("platform", "state", "score", "from", "why", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        style = _STATE_STYLES[row.state]
        score = "" if row.score is None else str(row.score)
        devices = "".join(f"\n{device}" for device in row.devices)
        table.add_row(row.name, f"[{style}]{row.state}[/]", score, row.origin, escape(row.reason + devices))
    console.print(table)


def show_capabilities(console: Console, rows: Sequence[CapabilityRow], options: Sequence[PlanRow]) -> None:
    """Show what one platform can do, and its own options."""
    table = Table("feature", "support", "verified by", "why", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        style = _SUPPORT_STYLES[row.support]
        table.add_row(row.feature, f"[{style}]{row.support}[/]", row.evidence, escape(row.reason))
    console.print(table)
    if options:
        console.print(_table(("--platform-option", "default", "values", ""), [_cells(row) for row in options]))


def show_pairs(console: Console, pairs: Iterable[tuple[str, str]]) -> None:
    """Show names and values, aligned."""
    console.print(_table(("", ""), list(pairs), header=False))


def _value_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return "none" if value is None else str(value)


def _cells(row: PlanRow) -> tuple[str, str, str, str]:
    return row.name, row.value, row.source, row.why


def _table(headers: tuple[str, ...], rows: Iterable[Sequence[str]], *, header: bool = True) -> Table:
    table = Table(*headers, box=None, pad_edge=False, show_header=header, header_style="bold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table


class StartProgress:
    """Shows how far each part of a start is; call it as the engine's progress listener."""

    def __init__(self, console: Console) -> None:
        """Prepare to draw on ``console``."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> StartProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bars away."""
        self._progress.stop()

    def __call__(self, part: str, done: int, total: int) -> None:
        """Draw that ``done`` of ``total`` of a part is done; a total of 0 is unknown."""
        if part not in self._tasks:
            self._tasks[part] = self._progress.add_task(part, total=total or None, amount="")
        amount = f"{format_bytes(done)} of {format_bytes(total)}" if total > 4096 else ""
        finished = {"total": 1, "completed": 1} if not total and done else {"total": total or None, "completed": done}
        self._progress.update(self._tasks[part], amount=amount, **finished)
