"""Outcomes of tasks item by item: how they are kept, their scores with bounds, and paired tests of two sides.

They know no task and no engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from cardan.accuracy.fingerprints import Fingerprint
from cardan.accuracy.statistics import Estimate, bootstrap, mean, perplexity_difference
from cardan.errors import GoldenFileError

VERSION = 2
"""Of the file; a reader takes its own version and those before."""
Z = 1.959963984540054
"""Of a confidence of 95 percent."""
Measure = Literal["share", "mean", "perplexity"]
"""What a score is: the share of right items, the mean of their values, or the perplexity of their logprobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One set.

    Attributes:
        values: of a share 1 for each right item and 0 for each wrong one, of a perplexity logprobs.
        said: what was chosen or answered, item by item; empty where that is no text.
        measure: what the score is.
        items: a checksum of the items, or empty where it is not known.
    """

    values: tuple[float, ...]
    said: tuple[str, ...] = ()
    measure: Measure = "share"
    items: str = ""

    def check(self) -> None:
        """See that it makes sense.

        Raises:
            ValueError: values are no numbers, or not those of the measure, or there is no such measure.
        """
        if self.measure not in get_args(Measure):
            raise ValueError(f"measure is {self.measure!r}")
        wrong = [value for value in self.values if not math.isfinite(value)]
        if self.measure == "share":
            wrong = [value for value in self.values if value not in (0, 1)]
        if wrong:
            raise ValueError(f"a {self.measure} has the value {wrong[0]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Outcomes of a model on a platform.

    Attributes:
        maker: who it was.
        outcomes: by set.
        asked: tasks of lm-evaluation-harness as they were named, of which groups become sets of other names.
    """

    maker: Fingerprint
    outcomes: Mapping[str, Outcome]
    asked: tuple[str, ...] = ()

    def write(self, path: Path) -> None:
        """Keep it as JSON.

        Raises:
            GoldenFileError: the file cannot be written.
        """
        value = {
            "version": VERSION,
            "maker": self.maker.to_json(),
            "outcomes": {name: asdict(outcome) for name, outcome in self.outcomes.items()},
            "asked": list(self.asked),
        }
        try:
            path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise GoldenFileError(f"{path} cannot be written: {error.strerror}. Choose another place.") from error


def read_evaluation(path: Path) -> Evaluation:
    """Read what was kept.

    Raises:
        GoldenFileError: the file is missing, no evaluation of this version, or has a set without items.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["version"] not in range(1, VERSION + 1):
            raise GoldenFileError(
                f"{path} is an evaluation of version {value['version']}, but this Cardan reads up to {VERSION}. "
                "Run it anew, or with the Cardan that wrote it."
            )
        outcomes = {name: _outcome(name, entry) for name, entry in value["outcomes"].items()}
        empty = [name for name, outcome in outcomes.items() if not outcome.values]
        if empty:
            raise GoldenFileError(f"{path} holds no outcome of {empty[0]}. Make it anew by cardan accuracy eval --out.")
        asked = tuple(map(str, value.get("asked", ())))
        return Evaluation(maker=Fingerprint.from_json(value["maker"]), outcomes=outcomes, asked=asked)
    except OSError as error:
        raise GoldenFileError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise GoldenFileError(
            f"{path} is no evaluation, since it is no text ({error.reason}). Make one by cardan accuracy eval --out."
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise GoldenFileError(
            f"{path} is no evaluation ({error!r}). Make one by cardan accuracy eval --out."
        ) from error


def _outcome(name: str, entry: Mapping[str, Any]) -> Outcome:
    """One set of a file; the first version had but one measure of each name."""
    old = "perplexity" if name == "perplexity" else "share"
    found = Outcome(
        values=tuple(map(float, entry["values"])),
        said=tuple(map(str, entry["said"])),
        measure=entry.get("measure", old),
        items=str(entry.get("items", "")),
    )
    found.check()
    return found


def score(outcome: Outcome) -> Estimate:
    """A set's score with its bounds: by drawing again, of shares by Wilson's interval."""
    values = np.asarray(outcome.values, np.float64)
    if outcome.measure == "perplexity":
        return bootstrap(values, lambda drawn: np.asarray(np.exp(-drawn.mean(axis=1))))
    if outcome.measure == "mean":
        return bootstrap(values, mean)
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
        measure: what the scores are.
        ours: score of the first.
        theirs: score of the second.
        difference: second less first, with bounds over the items or tokens that both share.
        only_ours: items that only the first has right.
        only_theirs: items that only the second has right.
        p: probability of a difference as large by chance: McNemar's exact test, or None where no item is right
            or wrong.
    """

    name: str
    measure: Measure
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
        raise _nothing_in_common(ours, theirs)
    return names


def check_in_common(kept: Evaluation, sets: Sequence[str], tasks: Sequence[str]) -> None:
    """See that what is to run can be paired with what is kept, as far as that is known before.

    Args:
        kept: of another engine.
        sets: bundled ones that are to run.
        tasks: of lm-evaluation-harness that are to run; groups and patterns too.

    Raises:
        GoldenFileError: they have no set in common.
    """
    if not any(name in kept.outcomes for name in sets) and not any(_may_share(task, kept) for task in tasks):
        raise _nothing_in_common(kept.outcomes, (*sets, *tasks))


def check_tokens(kept: Evaluation, tokenizer: str) -> None:
    """See that perplexities can be paired token by token.

    Args:
        kept: of another engine.
        tokenizer: checksum of what the model's tokenizer makes of texts.

    Raises:
        GoldenFileError: the tokenizers differ.
    """
    if "perplexity" in kept.outcomes and kept.maker.tokenizer and kept.maker.tokenizer != tokenizer:
        raise GoldenFileError(
            "The evaluations have other tokens in perplexity, since their tokenizers differ: that of "
            f"{kept.maker.model} is another than the model's here. Compare models of one tokenizer, or leave the set "
            "out by --set."
        )


def _may_share(task: str, kept: Evaluation) -> bool:
    """Whether a task, or one of a group or of a pattern, may be among those that are kept."""
    known = {name.partition("/")[0] for name in kept.outcomes if "/" in name}
    if known and not kept.asked:
        return True
    return task in kept.asked or any(name.startswith(f"{task}_") or fnmatchcase(name, task) for name in known)


def _nothing_in_common(ours: Iterable[str], theirs: Iterable[str]) -> GoldenFileError:
    return GoldenFileError(
        f"The evaluations have no set in common: {', '.join(ours) or 'none'} against {', '.join(theirs)}. "
        "Run both with the same --set or --harness-tasks."
    )


def _of_one_measure(ours: Outcome, theirs: Outcome) -> tuple[Outcome, Outcome]:
    """Two means where one side's values happen to be 0 and 1 only, as where a broken platform has all of them 0."""
    if {ours.measure, theirs.measure} == {"share", "mean"}:
        return replace(ours, measure="mean"), replace(theirs, measure="mean")
    return ours, theirs


def _paired(name: str, ours: Outcome, theirs: Outcome) -> Paired:
    ours, theirs = _of_one_measure(ours, theirs)
    a, b = (np.asarray(side.values, np.float64) for side in (ours, theirs))
    if len(a) != len(b):
        raise GoldenFileError(
            f"The evaluations have {len(a)} and {len(b)} items in {name}: tokenizers or sets differ. Run both anew."
        )
    if ours.measure != theirs.measure or (ours.items and theirs.items and ours.items != theirs.items):
        raise GoldenFileError(f"The evaluations have other items in {name}. Run both anew, with the same tasks.")
    scores: dict[str, Any] = {"measure": ours.measure, "ours": score(ours), "theirs": score(theirs)}
    if ours.measure == "perplexity":
        return Paired(name=name, difference=bootstrap(np.stack((a, b), axis=1), perplexity_difference), **scores)
    difference = bootstrap(b - a, mean, seed=1)
    if ours.measure == "mean":
        return Paired(name=name, difference=difference, **scores)
    only_ours, only_theirs = int(((a == 1) & (b == 0)).sum()), int(((a == 0) & (b == 1)).sum())
    return Paired(
        name=name,
        difference=difference,
        only_ours=only_ours,
        only_theirs=only_theirs,
        p=mcnemar(only_ours, only_theirs),
        **scores,
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
