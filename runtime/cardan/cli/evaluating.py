"""``cardan accuracy eval``: scores of a model's own tasks on a platform, and paired tests with another.

It knows no task: ``cardan.accuracy.evaluation`` runs and scores them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cardan.accuracy.evaluation import (
    SETS,
    Evaluation,
    chosen_sets,
    common_sets,
    evaluate,
    pair,
    read_evaluation,
    score,
)
from cardan.accuracy.recording import tokenizer_for
from cardan.accuracy.statistics import Estimate
from cardan.cli.flags import ENGINE_GROUPS, config_flags, log_level_flag, takes_flags
from cardan.cli.measuring import Bars, measured_config
from cardan.cli.terminal import messages, results, set_up_logging


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EvaluationFlags:
    """What is run, and where scores go."""

    set: Annotated[tuple[str, ...], Parameter(help=f"A set to run; all by default. One of {', '.join(SETS)}.")] = ()
    out: Annotated[Path | None, Parameter(help="Keep all items' outcomes in this file.")] = None
    against: Annotated[Path | None, Parameter(help="Outcomes of another engine, for paired tests.")] = None


@takes_flags((*config_flags(ENGINE_GROUPS), log_level_flag()))
def evaluate_command(*, flags: EvaluationFlags = EvaluationFlags(), **values: Any) -> int:
    """Run the bundled tasks: perplexity, multiple choice and exact answers, with confidence intervals."""
    other = None if flags.against is None else read_evaluation(flags.against)
    chosen = chosen_sets(flags.set)
    if other is not None:
        common_sets(other.outcomes, chosen)
    config = measured_config(values)
    console = messages()
    set_up_logging(config.server.log_level, console)
    tokenizer = tokenizer_for(config, required=True)
    assert tokenizer is not None, "it is required"
    with Bars(console) as bars:
        done = evaluate(config, tokenizer, chosen, bars)
    if flags.out is not None:
        done.write(flags.out)
    show_evaluation(results(), done)
    if other is not None:
        show_pairs(results(), other, done)
    return 0


def show_evaluation(console: Console, done: Evaluation) -> None:
    """Scores with their bounds."""
    console.print(f"[bold]{escape(done.maker.label)}[/], {escape(done.maker.device)}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("set", "items", "score"):
        table.add_column(header)
    for name, outcome in done.outcomes.items():
        table.add_row(name, str(len(outcome.values)), _estimate(name, score(name, outcome)))
    console.print(table)


def show_pairs(console: Console, other: Evaluation, done: Evaluation) -> None:
    """Both sides' scores, and whether they differ."""
    console.print(f"[bold]{escape(other.maker.label)}[/] against [bold]{escape(done.maker.label)}[/]")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("set", "first", "second", "only first right", "only second right", "verdict"):
        table.add_column(header)
    for found in pair(other, done):
        word = "differs" if found.differs else "no difference beyond chance"
        said = f"{word}, p = {found.p:.2g}" if found.p is not None else f"{word}: {found.difference.value:+.2g}"
        counts = ("", "") if found.p is None else (str(found.only_ours), str(found.only_theirs))
        table.add_row(found.name, _estimate(found.name, found.ours), _estimate(found.name, found.theirs), *counts, said)
    console.print(table)


def _estimate(name: str, value: Estimate) -> str:
    form = ".4f" if name == "perplexity" else ".1%"
    return f"{value.value:{form}} ({value.low:{form}} … {value.high:{form}})"
