"""Request parameters: draws from known logits, what platforms say, and what a verdict makes of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accuracy_tiny import tiny_config

from cardan.accuracy.answers import LEAST_P, Answer, failures, read_answers
from cardan.accuracy.comparison import compare
from cardan.accuracy.golden import read_golden
from cardan.accuracy.semantics import (
    AFTER_HISTORY,
    DRAWS,
    HISTORY,
    PARAMETERS,
    PROMPT,
    TRIED,
    WITH_HISTORY,
    measure,
    probabilities,
    table,
)
from cardan.accuracy.session import Session
from cardan.accuracy.verdict import Verdict
from cardan.errors import CardanError, CheckpointError, ConfigError, UnsupportedError
from cardan.platform import Capabilities, Feature


@pytest.fixture
def session(tiny_llama: Path) -> Iterator[Session]:
    with Session(tiny_config(tiny_llama, "cpu")) as opened:
        yield opened


@pytest.mark.parametrize("platform", ["cpu", pytest.param("mlx", marks=pytest.mark.slow)])
def test_draws_follow_every_parameter(tiny_llama: Path, platform: str) -> None:
    with Session(tiny_config(tiny_llama, platform)) as session:
        kept = measure(session)
    answers = read_answers(kept)
    assert list(answers) == [name for name, _ in PARAMETERS]
    for name in TRIED:
        answer = answers[name]
        assert answer.support in ("native", "emulated")
        assert answer.draws == (AFTER_HISTORY if name in WITH_HISTORY else DRAWS)
        assert answer.p is not None
        assert answer.p > 1e-4, answer.describe()
        assert "as it should" in answer.describe()
        assert not answer.fails
    assert answers["grammars"].p is None
    assert answers["custom_logit_processor"].support == "native"
    assert failures(answers, "here") == []


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"])
def test_probabilities_are_those_of_transformers(name: str) -> None:
    """Each filter on its own; transformers' penalty looks at all ids that were given."""
    import torch
    from transformers.generation import logits_process as process

    params, logits = TRIED[name], table()
    output = HISTORY if name in WITH_HISTORY else ()
    warpers = {
        "temperature": lambda: process.TemperatureLogitsWarper(params.temperature),
        "top_k": lambda: process.TopKLogitsWarper(params.top_k),
        "top_p": lambda: process.TopPLogitsWarper(params.top_p),
        "min_p": lambda: process.MinPLogitsWarper(params.min_p),
        "repetition_penalty": lambda: process.RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
    }
    ids = torch.tensor([[*PROMPT, *output]])
    want = warpers[name]()(ids, torch.from_numpy(logits)[None].clone()).double().softmax(-1)[0].numpy()
    assert np.allclose(probabilities(logits, params, output), want, atol=1e-7)


def test_penalties_and_bias_move_logits_by_definition() -> None:
    """By OpenAI's formula: ``mu[j] - c[j] * frequency - (c[j] > 0) * presence``, and a bias is added."""
    logits = table().astype(np.float64)
    plain = np.exp(logits) / np.exp(logits).sum()
    counts = np.bincount(HISTORY, minlength=len(logits))
    for name, moved in (
        ("frequency_penalty", 1.5 * counts),
        ("presence_penalty", 1.5 * (counts > 0)),
        ("logit_bias", -np.array([TRIED["logit_bias"].logit_bias.get(token, 0.0) for token in range(len(logits))])),
    ):
        want = plain * np.exp(-moved)
        got = probabilities(table(), TRIED[name], HISTORY if name in WITH_HISTORY else ())
        assert np.allclose(got, want / want.sum(), atol=1e-9)


def test_what_a_platform_refuses_is_said_and_not_tried(session: Session) -> None:
    features = {name: answer for name, answer in session.capabilities.features.items() if name != Feature.PENALTIES}
    session.capabilities = Capabilities(features=features)
    answers = read_answers(measure(session))
    refused = answers["presence_penalty"]
    assert (refused.support, refused.reason, refused.p) == ("refused", "the platform does not mention it", None)
    assert refused.describe() == "refused"
    assert answers["top_p"].p is not None


@pytest.mark.parametrize("kind", [UnsupportedError, CheckpointError, ConfigError])
def test_a_device_that_loads_no_table_is_not_tried(
    kind: type[CardanError], session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> None:
        raise kind("only compiled models")

    monkeypatch.setattr(session.prepared.device, "load", load)
    answers = read_answers(measure(session))
    assert answers["top_p"].p is None
    assert answers["top_p"].note == "not tried, since the device loads no table of logits: only compiled models"
    assert answers["grammars"].note == ""


def test_a_parameter_that_is_not_honoured_makes_a_difference(recorded, tmp_path: Path) -> None:
    golden = recorded()
    good = Answer(name="top_p", support="native", draws=1000, statistic=9.0, freedom=6, p=0.2)
    bad = replace(good, statistic=1e9, freedom=0, p=0.0, note="401 tokens were drawn that it excludes")
    kept = replace(golden, semantics={"top_p": vars_of(good)})
    kept.write(tmp_path / "x.cardan")
    ours = read_golden(tmp_path / "x.cardan")
    assert ours.semantics == kept.semantics
    assert compare(ours, ours).judgement.verdict is Verdict.SAME
    compared = compare(ours, replace(golden, semantics={"top_p": vars_of(bad)}))
    assert compared.judgement.verdict is Verdict.DIFFERENT
    assert compared.judgement.reasons[0].startswith("top_p is not honoured by mlx: 1000 draws from known logits")
    assert "401 tokens were drawn that it excludes" in compared.judgement.reasons[0]
    (meaning,) = compared.semantics
    assert meaning.ours == good
    assert meaning.theirs is not None
    assert meaning.theirs.fails
    assert "drawn otherwise" in meaning.theirs.describe()
    unknown = compare(golden, kept).semantics[0]
    assert unknown.ours is None
    assert bad.p is not None
    assert bad.p < LEAST_P


def vars_of(answer: Answer) -> dict[str, Any]:
    return {name: getattr(answer, name) for name in answer.__slots__}
