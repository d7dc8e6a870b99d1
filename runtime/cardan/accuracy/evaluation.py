"""Tasks with a score: perplexity of texts, multiple choice, and answers that are right or wrong.

It knows no platform. Sets are the project's own and small: they show whether a model is whole, and by paired tests
whether two platforms differ, not how good a model is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from cardan.accuracy.cases import Case, bundled_texts
from cardan.accuracy.fingerprints import Fingerprint, fingerprint
from cardan.accuracy.outcomes import Evaluation, Outcome
from cardan.accuracy.session import Progress, Run, Session
from cardan.config import EngineConfig
from cardan.engine.preparation import open_and_resolve
from cardan.errors import ConfigError
from cardan.platform import Platform
from cardan.text.tokenizer import Tokenizer

BUNDLED = "tasks.json"
ANSWER_TOKENS = 8
"""Tokens of an answer."""


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


def maker_of(config: EngineConfig, tokenizer: Tokenizer, progress: Progress | None = None) -> Fingerprint:
    """Who an engine of a config would be, as far as that is known before a device is opened.

    Raises:
        CardanError: the model, the platform or a setting is refused.
    """
    opened = open_and_resolve(config)
    try:
        capabilities = opened.platform.capabilities(opened.plan.device)
        return fingerprint(opened.plan, capabilities, opened.checkpoint, tokenizer, progress=progress)
    finally:
        opened.checkpoint.close()


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


def _print_of(items: Any) -> str:
    return hashlib.sha256(json.dumps(items).encode()).hexdigest()[:16]


def _perplexity(run: Run, tokenizer: Tokenizer, progress: Progress | None) -> Outcome:
    """Of the bundled texts, each once."""
    cases = [text.case(tokenizer.encode) for text in bundled_texts()]
    scores = run.score(cases, 1, progress)
    values = tuple(float(value) for score in scores for value in score.logprobs)
    return Outcome(values=values, measure="perplexity")


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
    return Outcome(values=tuple(values), said=tuple(said), items=_print_of(items))


def _answers(run: Run, tokenizer: Tokenizer, progress: Progress | None) -> Outcome:
    """What the model goes on with after a question, up to the end of the line or sentence."""
    tasks = _tasks()
    items = tasks["answers"]
    cases = []
    for number, item in enumerate(items):
        ids = tuple(tokenizer.encode(tasks["shots"] + item["question"]))
        cases.append(Case(name=str(number), ids=ids, num_prompt=len(ids), greedy_tokens=ANSWER_TOKENS))
    values, said = [], []
    for done, (item, free) in enumerate(zip(items, run.generate(cases), strict=True), 1):
        text = tokenizer.decode(free.ids.tolist())
        answer = text.strip().partition("\n")[0].rstrip(".! ")
        values.append(float(answer.casefold() in {accepted.casefold() for accepted in item["accepted"]}))
        said.append(answer)
        if progress is not None:
            progress("answers", done, len(cases))
    return Outcome(values=tuple(values), said=tuple(said), items=_print_of(items))


SETS: Mapping[str, Callable[[Run, Tokenizer, Progress | None], Outcome]] = {
    "perplexity": _perplexity,
    "choices": _choices,
    "answers": _answers,
}
"""The sets by name."""
