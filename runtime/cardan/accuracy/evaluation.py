"""Tasks with a score: perplexity of texts, multiple choice, and answers that are right or wrong.

It knows no platform. Sets are the project's own and small: they show whether a model is whole, and by paired tests
whether two platforms differ, not how good a model is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from cardan.accuracy.cases import Case, bundled_texts
from cardan.accuracy.fingerprints import Fingerprint, fingerprint
from cardan.accuracy.session import Progress, Run, Session
from cardan.accuracy.statistics import Estimate, bootstrap, mean, perplexity_difference
from cardan.config import EngineConfig
from cardan.errors import ConfigError, GoldenFileError
from cardan.platform import Platform
from cardan.text.tokenizer import Tokenizer

BUNDLED = "tasks.json"
VERSION = 1
ANSWER_TOKENS = 8
"""Tokens of an answer."""
Z = 1.959963984540054
"""Of a confidence of 95 percent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One set.

    Attributes:
        values: of ``perplexity`` the logprob of each token, else 1 for each right item and 0 for each wrong one.
        said: what was chosen or answered, item by item; empty for ``perplexity``.
    """

    values: tuple[float, ...]
    said: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Outcomes of a model on a platform.

    Attributes:
        maker: who it was.
        outcomes: by set.
    """

    maker: Fingerprint
    outcomes: Mapping[str, Outcome]

    def write(self, path: Path) -> None:
        """Keep it as JSON."""
        value = {
            "version": VERSION,
            "maker": self.maker.to_json(),
            "outcomes": {name: asdict(outcome) for name, outcome in self.outcomes.items()},
        }
        path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_evaluation(path: Path) -> Evaluation:
    """Read what was kept.

    Raises:
        GoldenFileError: the file is missing, no evaluation of this version, or has a set without items.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["version"] != VERSION:
            raise GoldenFileError(
                f"{path} is an evaluation of version {value['version']}, but this Cardan reads {VERSION}. "
                "Run it anew, or with the Cardan that wrote it."
            )
        outcomes = {
            name: Outcome(values=tuple(map(float, entry["values"])), said=tuple(map(str, entry["said"])))
            for name, entry in value["outcomes"].items()
        }
        empty = [name for name, outcome in outcomes.items() if not outcome.values]
        if empty:
            raise GoldenFileError(f"{path} holds no outcome of {empty[0]}. Make it anew by cardan accuracy eval --out.")
        return Evaluation(maker=Fingerprint.from_json(value["maker"]), outcomes=outcomes)
    except OSError as error:
        raise GoldenFileError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise GoldenFileError(
            f"{path} is no evaluation ({error!r}). Make one by cardan accuracy eval --out."
        ) from error


def evaluate(
    config: EngineConfig,
    tokenizer: Tokenizer,
    sets: Sequence[str] = (),
    progress: Progress | None = None,
    platform: Platform | None = None,
) -> Evaluation:
    """Run sets through an engine as it serves.

    Args:
        config: what runs.
        tokenizer: the model's.
        sets: which; all by default.
        progress: told how far it is.
        platform: taken instead of the one that the config names.

    Raises:
        ConfigError: there is no such set.
        CardanError: the engine does not start, or a request fails.
    """
    chosen = chosen_sets(sets)
    with Session(config, progress, platform) as session:
        opened = session.prepared.opened
        maker = fingerprint(session.plan, session.capabilities, opened.checkpoint, tokenizer, progress=progress)
        outcomes = {}
        for name in chosen:
            with session.run() as run:
                outcomes[name] = SETS[name](run, tokenizer, progress)
    return Evaluation(maker=maker, outcomes=outcomes)


def chosen_sets(sets: Sequence[str]) -> tuple[str, ...]:
    """Names of the sets that run: those that are given, or all.

    Raises:
        ConfigError: there is no such set.
    """
    unknown = [name for name in sets if name not in SETS]
    if unknown:
        raise ConfigError(f"--set must be one of {', '.join(SETS)}, got {unknown[0]!r}.")
    return tuple(sets) or tuple(SETS)


def _tasks() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(resources.files("cardan.accuracy").joinpath(BUNDLED).read_text(encoding="utf-8"))
    return found


def _perplexity(run: Run, tokenizer: Tokenizer, progress: Progress | None) -> Outcome:
    """Of the bundled texts, each once."""
    cases = [text.case(tokenizer.encode) for text in bundled_texts()]
    scores = run.score(cases, 1, progress)
    return Outcome(values=tuple(float(value) for score in scores for value in score.logprobs))


def _choices(run: Run, tokenizer: Tokenizer, progress: Progress | None) -> Outcome:
    """The end of a sentence whose text is likeliest, by its byte, given the beginning."""
    values, said = [], []
    items = _tasks()["choices"]
    cases: list[Case] = []
    for number, item in enumerate(items):
        prompt = len(tokenizer.encode(item["question"]))
        for index, choice in enumerate(item["choices"]):
            ids = tuple(tokenizer.encode(f"{item['question']} {choice}"))
            start = min(prompt, len(ids) - 1)
            cases.append(Case(name=f"{number}.{index}", ids=ids, num_prompt=len(ids) - 1, score_from=max(start, 1)))
    scores = iter(run.score(cases, 1, progress))
    for item in items:
        sums = [float(next(scores).logprobs.sum()) / len(f" {choice}".encode()) for choice in item["choices"]]
        best = int(np.argmax(sums))
        values.append(float(best == item["answer"]))
        said.append(item["choices"][best])
    return Outcome(values=tuple(values), said=tuple(said))


def _answers(run: Run, tokenizer: Tokenizer, progress: Progress | None) -> Outcome:
    """What the model goes on with after a question, up to the end of the line or sentence."""
    tasks = _tasks()
    cases = []
    for number, item in enumerate(tasks["answers"]):
        ids = tuple(tokenizer.encode(tasks["shots"] + item["question"]))
        cases.append(Case(name=str(number), ids=ids, num_prompt=len(ids), greedy_tokens=ANSWER_TOKENS))
    values, said = [], []
    for done, (item, free) in enumerate(zip(tasks["answers"], run.generate(cases), strict=True), 1):
        text = tokenizer.decode(free.ids.tolist())
        answer = text.strip().partition("\n")[0].rstrip(".! ")
        values.append(float(answer.casefold() in {accepted.casefold() for accepted in item["accepted"]}))
        said.append(answer)
        if progress is not None:
            progress("answers", done, len(cases))
    return Outcome(values=tuple(values), said=tuple(said))


SETS: Mapping[str, Callable[[Run, Tokenizer, Progress | None], Outcome]] = {
    "perplexity": _perplexity,
    "choices": _choices,
    "answers": _answers,
}
"""The sets by name."""


def score(name: str, outcome: Outcome) -> Estimate:
    """A set's score with its bounds: the perplexity, or the share of right items."""
    values = np.asarray(outcome.values, np.float64)
    if name == "perplexity":
        return bootstrap(values, lambda drawn: np.asarray(np.exp(-drawn.mean(axis=1))))
    return wilson(int(values.sum()), len(values))


def wilson(right: int, count: int) -> Estimate:
    """A share with its confidence interval.

    Source: Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", 1927.
    """
    share = right / count
    middle = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z / (1 + Z**2 / count) * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    return Estimate(share, max(0.0, middle - half), min(1.0, middle + half))


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """One set on two sides.

    Attributes:
        name: of the set.
        ours: score of the first.
        theirs: score of the second.
        difference: second less first, for perplexity with bounds over tokens that both share.
        only_ours: items that only the first has right.
        only_theirs: items that only the second has right.
        p: probability of a difference as large by chance: McNemar's exact test; None for perplexity.
    """

    name: str
    ours: Estimate
    theirs: Estimate
    difference: Estimate
    only_ours: int = 0
    only_theirs: int = 0
    p: float | None = None

    @property
    def differs(self) -> bool:
        """Whether the difference is more than chance, at 5 percent."""
        return self.difference.excludes_zero if self.p is None else self.p < 0.05


def pair(ours: Evaluation, theirs: Evaluation) -> tuple[Paired, ...]:
    """The sets that both have, item by item.

    Raises:
        GoldenFileError: they have none in common, or other items.
    """
    names = common_sets(ours.outcomes, theirs.outcomes)
    return tuple(_paired(name, ours.outcomes[name], theirs.outcomes[name]) for name in names)


def common_sets(ours: Iterable[str], theirs: Iterable[str]) -> tuple[str, ...]:
    """Names that both sides have.

    Raises:
        GoldenFileError: there is none.
    """
    ours, theirs = tuple(ours), tuple(theirs)
    names = tuple(name for name in ours if name in theirs)
    if not names:
        raise GoldenFileError(
            f"The evaluations have no set in common: {', '.join(ours) or 'none'} against {', '.join(theirs)}. "
            "Run both with the same --set."
        )
    return names


def _paired(name: str, ours: Outcome, theirs: Outcome) -> Paired:
    a, b = (np.asarray(side.values, np.float64) for side in (ours, theirs))
    if len(a) != len(b):
        raise GoldenFileError(
            f"The evaluations have {len(a)} and {len(b)} items in {name}: tokenizers or sets differ. Run both anew."
        )
    scores = score(name, ours), score(name, theirs)
    if name == "perplexity":
        difference = bootstrap(np.stack((a, b), axis=1), perplexity_difference)
        return Paired(name=name, ours=scores[0], theirs=scores[1], difference=difference)
    only_ours, only_theirs = int(((a == 1) & (b == 0)).sum()), int(((a == 0) & (b == 1)).sum())
    return Paired(
        name=name,
        ours=scores[0],
        theirs=scores[1],
        difference=bootstrap(b - a, mean, seed=1),
        only_ours=only_ours,
        only_theirs=only_theirs,
        p=mcnemar(only_ours, only_theirs),
    )


def mcnemar(only_ours: int, only_theirs: int) -> float:
    """Two-sided exact test of items that only one side has right.

    Source: McNemar, "Note on the Sampling Error of the Difference Between Correlated Proportions or Percentages",
    1947, with binomial probabilities.
    """
    count = only_ours + only_theirs
    least = min(only_ours, only_theirs)
    tail = sum(math.comb(count, k) for k in range(least + 1))
    return min(1.0, 2.0 * float(tail / (1 << count)))
