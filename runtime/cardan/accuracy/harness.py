"""Runs tasks of lm-evaluation-harness against a server, and reads the outcome of every item from what it keeps.

It knows no engine and no task: the harness reads, asks and judges. It is a program of its own, often of another
environment than Cardan's.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from cardan.accuracy.outcomes import Measure, Outcome
from cardan.errors import CardanError, ConfigError

PROGRAM = "lm_eval"
INSTALL = "pip install 'lm_eval[api]', best in an environment of its own, whose bin/lm_eval --harness then names"
BUNDLED = "task_files"
CONCURRENT = 4
"""Requests that the harness keeps open."""
SHOWN_LINES = 12
"""Of its log where it fails."""
CLOSE = 1e-6
"""Relative difference up to which a score of the harness is that of the items."""


class HarnessError(CardanError):
    """The harness failed, or kept nothing that can be read; the message says where its log is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """What is to run.

    Attributes:
        program: the executable.
        tasks: by their names.
        folder: of task files, from which paths of data are relative.
        out: folder that results, all answers and the log are kept in.
        chat: asks by chats, as the model's template writes them, instead of completions.
        limit: only the first items of each task; None for all.
    """

    program: Path
    tasks: tuple[str, ...]
    folder: Path
    out: Path
    chat: bool = False
    limit: int | None = None

    @property
    def log(self) -> Path:
        """What it prints."""
        return self.out / "lm_eval.log"

    def command(self, url: str, model: str, max_length: int) -> list[str]:
        """How it is called for a server.

        Args:
            url: of the server, without ``/v1``.
            model: as the server names it.
            max_length: tokens of its context.

        Raises:
            HarnessError: the model's name has a comma, which separates arguments.
        """
        if "," in model:
            raise HarnessError(
                f"lm-evaluation-harness takes no commas in a model's name, got {model!r}. Pass --served-model-name."
            )
        kind, route = ("local-chat-completions", "chat/completions")
        if not self.chat:
            kind, route = ("local-completions", "completions")
        asked = {"model": model, "base_url": f"{url}/v1/{route}", "num_concurrent": CONCURRENT}
        if not self.chat:
            # The server tokenizes, so that the harness needs no tokenizer of the model; chats are sent as they are.
            asked |= {"tokenizer_backend": "remote", "max_length": max_length}
        command = [str(self.program), "run", "--model", kind]
        command += ["--model_args", ",".join(f"{name}={value}" for name, value in asked.items())]
        command += ["--tasks", ",".join(self.tasks), "--include_path", str(self.folder)]
        command += ["--output_path", str(self.out), "--log_samples"]
        command += ["--apply_chat_template"] if self.chat else []
        return command if self.limit is None else [*command, "--limit", str(self.limit)]


def find_harness(named: Path | None) -> Path:
    """The harness that is named, else the one beside this Python, else the one that a shell would find.

    Raises:
        ConfigError: there is none.
    """
    if named is not None:
        found = shutil.which(named.expanduser().absolute())
        if found is None:
            raise ConfigError(f"--harness {named} is no program that can be run. Install it: {INSTALL}.")
        return Path(found)
    beside = str(Path(sys.executable).parent)
    found = shutil.which(PROGRAM, path=beside) or shutil.which(PROGRAM)
    if found is None:
        raise ConfigError(
            f"--harness-tasks needs lm-evaluation-harness, but there is no {PROGRAM} in {beside} nor on the PATH. "
            f"Install it: {INSTALL}."
        )
    return Path(found).absolute()


def task_names(given: Sequence[str]) -> tuple[str, ...]:
    """Names of tasks, each flag with one or with several between commas.

    Raises:
        ConfigError: one is empty.
    """
    names = tuple(name.strip() for text in given for name in text.split(","))
    if not all(names):
        raise ConfigError("--harness-tasks has an empty name. Pass names such as arc_easy,gsm8k.")
    return tuple(dict.fromkeys(names))


def task_folder(named: Path | None) -> Path:
    """The folder of task files that is named, else that of the files that come along.

    Raises:
        ConfigError: there is no such folder.
    """
    if named is None:
        return Path(str(resources.files("cardan.accuracy").joinpath(BUNDLED)))
    named = named.expanduser()
    if not named.is_dir():
        raise ConfigError(f"--harness-folder {named} is no folder. Name one with task files (.yaml) and their data.")
    return named.absolute()


@contextmanager
def kept_in(named: Path | None) -> Iterator[Path]:
    """The folder that is named, made where it is missing, else one that is removed after.

    Where what was run failed, a folder with logs stays, since the error names them.

    Raises:
        ConfigError: it cannot be made.
    """
    if named is None:
        made = Path(tempfile.mkdtemp(prefix="cardan-harness-"))
        done = False
        try:
            yield made
            done = True
        finally:
            if done or not any(made.iterdir()):
                shutil.rmtree(made)
        return
    named = named.expanduser()
    try:
        named.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--harness-out {named} cannot be made: {error.strerror}. Choose another place.") from error
    yield named.absolute()


def run_harness(harness: Harness, url: str, model: str, max_length: int) -> dict[str, Outcome]:
    """Run the tasks, and return what came of every item by ``task/metric``.

    Args:
        harness: what runs.
        url: of a server that is ready, without ``/v1``.
        model: as it names its model.
        max_length: tokens of its context.

    Raises:
        HarnessError: the harness failed, or kept no outcomes.
    """
    before = set(harness.out.glob("*/results_*.json"))
    near = ",".join(filter(None, (os.environ.get("NO_PROXY", os.environ.get("no_proxy")), "127.0.0.1,localhost")))
    env = {**os.environ, "NO_PROXY": near, "no_proxy": near}
    try:
        with harness.log.open("w", encoding="utf-8") as log:
            command = harness.command(url, model, max_length)
            # paths of data are relative to the task files
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False, cwd=harness.folder, env=env
            )
    except OSError as error:
        raise HarnessError(f"{harness.program} cannot be run: {error.strerror}. Install it: {INSTALL}.") from error
    made = sorted(set(harness.out.glob("*/results_*.json")) - before)
    if done.returncode or not made:
        what = f"ended with exit code {done.returncode}" if done.returncode else "kept no results"
        raise HarnessError(f"{harness.program} {what}. The end of {harness.log}:\n{_end_of(harness.log)}")
    return read_outcomes(made[-1])


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
    return "\n".join([line for line in lines if line.strip()][-SHOWN_LINES:])


def read_outcomes(results: Path) -> dict[str, Outcome]:
    """Outcomes by ``task/metric`` (and the harness's filter, where there is one) of one run that was kept.

    Metrics whose score is neither a mean nor a perplexity of numbers of single items are left out.

    Raises:
        HarnessError: files are missing or not what the harness writes, or no metric is left.
    """
    stamp = results.stem.removeprefix("results_")
    try:
        kept = json.loads(results.read_text(encoding="utf-8"))
        found: dict[str, Outcome] = {}
        for task in sorted(kept["configs"]):
            path = results.with_name(f"samples_{task}_{stamp}.jsonl")
            if path.is_file():
                samples = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
                found |= _outcomes(task, samples, kept["results"][task])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise HarnessError(
            f"{results} is not what lm-evaluation-harness keeps ({error!r}). Take version 0.4.13 of it."
        ) from error
    if not found:
        raise HarnessError(f"{results} has no metric with a score of every item. Choose other tasks.")
    return found


def _outcomes(task: str, samples: Sequence[Mapping[str, Any]], scores: Mapping[str, Any]) -> dict[str, Outcome]:
    """Of one task, whose items come once for each filter."""
    found = {}
    for sieve in dict.fromkeys(str(sample["filter"]) for sample in samples):
        these = sorted((sample for sample in samples if sample["filter"] == sieve), key=lambda one: int(one["doc_id"]))
        items = hashlib.sha256("".join(sample["doc_hash"] for sample in these).encode()).hexdigest()[:16]
        answers = [sample["filtered_resps"][0] for sample in these]
        said = tuple(answers) if all(isinstance(answer, str) for answer in answers) else ()
        for metric in these[0]["metrics"]:
            values = [sample[metric] for sample in these]
            measure = _measure(values, scores.get(f"{metric},{sieve}"))
            if measure is not None:
                name = f"{task}/{metric}" if sieve == "none" else f"{task}/{metric},{sieve}"
                found[name] = Outcome(values=tuple(map(float, values)), said=said, measure=measure, items=items)
    return found


def _measure(values: Sequence[Any], score: Any) -> Measure | None:
    """What the harness makes of the items' values, or None where it is neither a mean nor a perplexity of them."""
    numbers = [value for value in values if isinstance(value, (int, float)) and math.isfinite(value)]
    if len(numbers) < len(values) or not isinstance(score, (int, float)):
        return None
    mean = math.fsum(numbers) / len(numbers)
    if math.isclose(mean, score, rel_tol=CLOSE, abs_tol=CLOSE):
        return "share" if set(numbers) <= {0, 1} else "mean"
    if mean <= 0 and math.isclose(math.exp(min(-mean, 700.0)), score, rel_tol=CLOSE):
        return "perplexity"
    return None
