"""``cardan accuracy eval``: scores of a model's tasks on a platform, and paired tests with another.

It knows no task: ``cardan.accuracy.evaluation`` runs and scores the bundled ones, lm-evaluation-harness its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cardan.accuracy.evaluation import SETS, chosen_sets, evaluate, maker_of
from cardan.accuracy.fingerprints import tokenizer_print
from cardan.accuracy.harness import Harness, find_harness, kept_in, run_harness, task_folder, task_names
from cardan.accuracy.outcomes import (
    Evaluation,
    Measure,
    Outcome,
    check_in_common,
    check_tokens,
    pair,
    read_evaluation,
    score,
)
from cardan.accuracy.recording import tokenizer_for
from cardan.accuracy.statistics import Estimate
from cardan.cli.flags import ENGINE_GROUPS, config_flags, log_level_flag, takes_flags
from cardan.cli.measuring import Bars, check_apart, check_writable, measured_config
from cardan.cli.served import serving
from cardan.cli.terminal import messages, results, set_up_logging
from cardan.config import EngineConfig
from cardan.errors import ConfigError
from cardan.text.tokenizer import Tokenizer


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EvaluationFlags:
    """What is run, and where scores go."""

    set: Annotated[
        tuple[str, ...],
        Parameter(help=f"A set to run; all by default, none with --harness-tasks. One of {', '.join(SETS)}."),
    ] = ()
    out: Annotated[Path | None, Parameter(help="Keep all items' outcomes in this file.")] = None
    against: Annotated[Path | None, Parameter(help="Outcomes of another engine, for paired tests.")] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class HarnessFlags:
    """Which tasks of lm-evaluation-harness run, and how."""

    harness_tasks: Annotated[
        tuple[str, ...],
        Parameter(help="Tasks of lm-evaluation-harness to run, several by several flags or between commas."),
    ] = ()
    harness: Annotated[
        Path | None, Parameter(help="Its program lm_eval; by default that beside this Python, or on the PATH.")
    ] = None
    harness_folder: Annotated[
        Path | None,
        Parameter(help="Folder of more task files, from which their data's paths are relative."),
    ] = None
    harness_out: Annotated[Path | None, Parameter(help="Folder for its results, all answers and logs.")] = None
    harness_chat: Annotated[bool, Parameter(negative="", help="Ask by chats instead of completions.")] = False
    harness_limit: Annotated[int | None, Parameter(help="Run only the first items of each of its tasks.")] = None

    def check(self) -> None:
        """See that they make sense.

        Raises:
            ConfigError: one has no effect, or a limit is below 1.
        """
        given = {
            "--harness": self.harness,
            "--harness-folder": self.harness_folder,
            "--harness-out": self.harness_out,
            "--harness-chat": self.harness_chat or None,
            "--harness-limit": self.harness_limit,
        }
        idle = [flag for flag, value in given.items() if value is not None]
        if idle and not self.harness_tasks:
            raise ConfigError(f"Without --harness-tasks, {', '.join(idle)} has no effect. Name tasks, or drop it.")
        if self.harness_limit is not None and self.harness_limit < 1:
            raise ConfigError(f"--harness-limit must be at least 1, got {self.harness_limit}.")

    def harness_in(self, out: Path) -> Harness:
        """What they name: the program, its tasks and the folder of its files.

        Raises:
            ConfigError: there is no harness, or no such folder.
        """
        return Harness(
            program=find_harness(self.harness),
            tasks=task_names(self.harness_tasks),
            folder=task_folder(self.harness_folder),
            out=out,
            chat=self.harness_chat,
            limit=self.harness_limit,
        )


@takes_flags((*config_flags(ENGINE_GROUPS), log_level_flag()))
def evaluate_command(
    *, flags: EvaluationFlags = EvaluationFlags(), harness_flags: HarnessFlags = HarnessFlags(), **values: Any
) -> int:
    """Run tasks, the bundled ones or lm-evaluation-harness's, with confidence intervals and paired tests."""
    harness_flags.check()
    check_writable(out=flags.out)
    check_apart((flags.against,), out=flags.out)
    other = None if flags.against is None else read_evaluation(flags.against)
    chosen = chosen_sets(flags.set) if flags.set or not harness_flags.harness_tasks else ()
    tasks = task_names(harness_flags.harness_tasks)
    if other is not None:
        check_in_common(other, chosen, tasks)
    with kept_in(harness_flags.harness_out) as folder:
        harness = harness_flags.harness_in(folder) if harness_flags.harness_tasks else None
        config = measured_config(values)
        console = messages()
        set_up_logging(config.server.log_level, console)
        tokenizer = tokenizer_for(config, required=True)
        assert tokenizer is not None, "it is required"
        if other is not None and "perplexity" in chosen:
            check_tokens(other, tokenizer_print(tokenizer))
        with Bars(console) as bars:
            done = _evaluated(config, tokenizer, chosen, harness, bars)
    show_evaluation(results(), done)
    if flags.out is not None:
        done.write(flags.out)
    if other is not None:
        show_pairs(results(), other, done)
    return 0


def _evaluated(
    config: EngineConfig, tokenizer: Tokenizer, chosen: tuple[str, ...], harness: Harness | None, bars: Bars
) -> Evaluation:
    """The bundled sets by an engine in this process, then the harness by a server."""
    if harness is None:
        return evaluate(config, tokenizer, chosen, bars)
    if chosen:
        own = evaluate(config, tokenizer, chosen, bars)
        maker, outcomes = own.maker, dict(own.outcomes)
    else:
        maker, outcomes = maker_of(config, tokenizer, bars), dict[str, Outcome]()
    bars("server", 0, 0)
    with serving(config, harness.out / "server.log") as served:
        bars("server", 1, 1)
        bars("lm-evaluation-harness", 0, 0)
        outcomes |= run_harness(harness, served.url, served.model, served.context_length)
        bars("lm-evaluation-harness", 1, 1)
    return Evaluation(maker=maker, outcomes=outcomes, asked=harness.tasks)


def show_evaluation(console: Console, done: Evaluation) -> None:
    """Scores with their bounds."""
    console.print(f"[bold]{escape(done.maker.label)}[/], {escape(done.maker.device)}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("set", "items", "score"):
        table.add_column(header)
    for name, outcome in done.outcomes.items():
        table.add_row(escape(name), str(len(outcome.values)), _estimate(outcome.measure, score(outcome)))
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
        sides = (_estimate(found.measure, side) for side in (found.ours, found.theirs))
        table.add_row(escape(found.name), *sides, *counts, said)
    console.print(table)


def _estimate(measure: Measure, value: Estimate) -> str:
    form = ".1%" if measure == "share" else ".4f"
    return f"{value.value:{form}} ({value.low:{form}} … {value.high:{form}})"
