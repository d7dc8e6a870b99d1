"""How records and comparisons look in the terminal.

It gets plain data and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cardan.accuracy.attribution_report import Attribution
from cardan.accuracy.comparison import CaseResult, Comparison, Divergence, Meaning
from cardan.accuracy.golden import Golden
from cardan.accuracy.noise import worst
from cardan.accuracy.statistics import Estimate
from cardan.accuracy.verdict import Verdict
from cardan.platform.report import format_bytes

_STYLES = {Verdict.SAME: "bold green", Verdict.DRIFT: "bold yellow", Verdict.DIFFERENT: "bold red"}
_TEXT_SHOWN = 48


def show_record(console: Console, golden: Golden, path: Path) -> None:
    """What was recorded."""
    console.print(f"[bold]{escape(golden.fingerprint.label)}[/], {escape(golden.fingerprint.device)}")
    console.print(
        f"{golden.num_positions} positions of {len(golden.cases)} prompts, top {golden.top}, "
        f"{format_bytes(path.stat().st_size)} in {escape(str(path))}"
    )
    for note in golden.notes:
        console.print(f"[yellow]note:[/] {escape(note)}")
    if golden.noise:
        table = _table("noise floor", "mean KL", "p99 KL", "largest KL", "largest move of a logprob")
        for name, spread in (*golden.noise.items(), ("largest of all", worst(golden.noise))):
            table.add_row(name, *(f"{spread[key]:.2g}" for key in ("mean", "p99", "max", "moves")))
        console.print(table)


def show_comparison(console: Console, compared: Comparison) -> None:
    """Fingerprints first, then the verdict with its reasons, then the numbers."""
    console.print(f"[bold]{escape(compared.ours)}[/] against [bold]{escape(compared.theirs)}[/]")
    for difference in compared.differences:
        style = "yellow" if difference.weighs else "dim"
        console.print(f"[{style}]differs:[/] {escape(difference.describe())}", soft_wrap=True)
    judgement = compared.judgement
    console.print(f"verdict: [{_STYLES[judgement.verdict]}]{judgement.verdict}[/]")
    for reason in judgement.reasons:
        console.print(f"  {escape(reason)}", soft_wrap=True)
    if compared.attribution is not None:
        _show_attribution(console, compared.attribution)
    console.print(f"noise floor {judgement.band_from}: mean KL {judgement.band['mean']:.2g}")
    table = _table(
        f"KL in nats, of the top {compared.top}: a lower bound", "positions", "mean", "median", "p99", "largest"
    )
    for name, divergence in (("all positions", compared.all_positions), *compared.stages.items()):
        table.add_row(name, *_cells(divergence))
    console.print(table)
    perplexities = compared.perplexities
    console.print(f"same likeliest token: {_estimate(compared.agreement, '.2%')}")
    console.print(
        f"perplexity: {perplexities.ours:.4f} and {perplexities.theirs:.4f}, difference "
        f"{_estimate(perplexities.difference, '+.2g')}"
    )
    _show_cases(console, compared.cases)
    _show_meanings(console, compared.semantics)


def _show_attribution(console: Console, found: Attribution) -> None:
    for statement in found.statements:
        console.print(f"[bold]attribution:[/] {escape(statement)}", soft_wrap=True)
    if not found.trials:
        return
    table = _table("without", "instead", "mean KL left", "largest left", "")
    for trial in found.trials:
        numbers = ("", "") if trial.note else (f"{trial.kl_mean:.2g}", f"{trial.kl_max:.2g}")
        table.add_row(
            escape(trial.feature), escape(trial.how), *numbers, escape(trial.note) or ("within noise" * trial.gone)
        )
    console.print(table)


def _show_meanings(console: Console, meanings: Sequence[Meaning]) -> None:
    if not meanings:
        return
    table = _table("request parameter", "first", "second")
    for meaning in meanings:
        sides = ("not known" if side is None else side.describe() for side in (meaning.ours, meaning.theirs))
        table.add_row(escape(meaning.name), *(escape(side) for side in sides))
    console.print(table)


def _show_cases(console: Console, cases: Sequence[CaseResult]) -> None:
    table = _table("prompt", "positions", "mean KL", "largest KL", "agreement", "greedy text")
    for case in cases:
        count = len(case.kl)
        parts = "the same" if case.flip is None else f"parts at {case.flip.at}, margin {case.flip.least_margin:.2g}"
        text = " ".join(case.their_text.split())[:_TEXT_SHOWN]
        table.add_row(
            escape(case.name),
            str(count),
            f"{sum(case.kl) / count:.2g}",
            f"{max(case.kl):.2g}",
            f"{case.agreement:.1%}",
            escape(f"{parts}: {text}" if text else parts),
        )
    console.print(table)


def _cells(divergence: Divergence) -> tuple[str, ...]:
    estimates = (divergence.mean, divergence.median, divergence.p99)
    return str(divergence.positions), *(_estimate(item, ".2g") for item in estimates), f"{divergence.largest:.2g}"


def _estimate(estimate: Estimate, form: str) -> str:
    return f"{estimate.value:{form}} ({estimate.low:{form}} … {estimate.high:{form}})"


def _table(*headers: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, header in enumerate(headers):
        table.add_column(header, justify="left" if index in (0, len(headers) - 1) else "right")
    return table
