"""Tasks with a score: what counts as right, how sure a score is, and what two platforms' outcomes say of each other."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from accuracy_tiny import tiny_config

from cardan.accuracy.evaluation import evaluate
from cardan.accuracy.fingerprints import Fingerprint
from cardan.accuracy.outcomes import (
    Evaluation,
    Measure,
    Outcome,
    check_in_common,
    mcnemar,
    pair,
    read_evaluation,
    score,
    wilson,
)
from cardan.accuracy.recording import tokenizer_for
from cardan.cli import app
from cardan.errors import ConfigError, GoldenFileError

MAKER = Fingerprint(
    source="cardan", platform="p", device="d", model="m", architecture="A", vocab_size=9, dtype="float32"
)


def of(**outcomes: tuple[float, ...]) -> Evaluation:
    measures: dict[str, Measure] = {"perplexity": "perplexity", "f1": "mean"}
    made = {name: Outcome(values=values, measure=measures.get(name, "share")) for name, values in outcomes.items()}
    return Evaluation(maker=MAKER, outcomes=made)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"), [(5, 10, 0.2366, 0.7634), (0, 10, 0.0, 0.2775), (29, 30, 0.8333, 0.9941)]
)
def test_intervals_are_wilsons(right: int, count: int, low: float, high: float) -> None:
    """Values of statsmodels' ``proportion_confint(method="wilson")``."""
    found = wilson(right, count)
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


@pytest.mark.parametrize(("a", "b", "p"), [(0, 0, 1.0), (1, 9, 0.021484375), (5, 5, 1.0), (0, 6, 0.03125)])
def test_mcnemar_is_the_binomial_test(a: int, b: int, p: float) -> None:
    assert mcnemar(a, b) == pytest.approx(p)
    assert mcnemar(b, a) == pytest.approx(p)


def test_pairs_are_judged_item_by_item() -> None:
    ours = of(choices=(1, 1, 1, 0, 0, 0, 0, 0, 0), perplexity=tuple(np.linspace(-3, -1, 200)))
    theirs = of(choices=(1, 1, 1, 1, 1, 1, 1, 1, 1), perplexity=tuple(np.linspace(-3, -1, 200) - 0.01))
    perplexity, choices = sorted(pair(ours, theirs), key=lambda found: found.name, reverse=True)
    assert (choices.only_ours, choices.only_theirs, choices.p) == (0, 6, 0.03125)
    assert choices.differs
    assert perplexity.theirs.value == pytest.approx(perplexity.ours.value * np.exp(0.01))
    assert perplexity.differs
    same = pair(ours, ours)
    assert not any(found.differs for found in same)
    assert score(ours.outcomes["perplexity"]).value == pytest.approx(np.exp(2.0))


def test_values_that_are_no_shares_have_bounds_by_drawing() -> None:
    values = tuple(np.linspace(0, 1, 160))
    (found,) = pair(of(f1=values), of(f1=tuple(np.asarray(values) + 0.1)))
    assert found.p is None
    assert found.ours.low < found.ours.value == pytest.approx(0.5)
    assert found.difference.value == pytest.approx(0.1)
    assert found.differs
    (same,) = pair(of(f1=values), of(f1=values))
    assert not same.differs


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"values": [1.0, float("nan")], "said": []}, "a share has the value nan"),
        ({"values": [0.5], "said": []}, "a share has the value 0.5"),
        ({"values": [float("inf")], "said": [], "measure": "mean"}, "a mean has the value inf"),
        ({"values": [1.0], "said": [], "measure": "luck"}, "measure is 'luck'"),
        (5, "is no evaluation"),
    ],
)
def test_values_that_make_no_sense_are_refused(entry: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text(json.dumps({"version": 2, "maker": MAKER.to_json(), "outcomes": {"a": entry}}))
    with pytest.raises(GoldenFileError, match=message):
        read_evaluation(path)


def test_files_of_the_first_version_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    outcomes = {"perplexity": {"values": [-1.0], "said": []}, "choices": {"values": [1.0], "said": ["a"]}}
    path.write_text(json.dumps({"version": 1, "maker": MAKER.to_json(), "outcomes": outcomes}))
    found = read_evaluation(path).outcomes
    assert (found["perplexity"].measure, found["choices"].measure) == ("perplexity", "share")


def test_a_mean_is_paired_with_values_that_happen_to_be_0_and_1() -> None:
    sides = [
        Evaluation(maker=MAKER, outcomes={"t/f1": Outcome(values=values, measure=measure, items="a")})
        for values, measure in (((0.5, 0.25, 0.75) * 40, "mean"), ((0.0,) * 120, "share"))
    ]
    (found,) = pair(*sides)
    assert (found.measure, found.p) == ("mean", None)
    assert found.difference.value == pytest.approx(-0.5)
    assert found.differs


def test_items_of_another_task_are_not_paired() -> None:
    sides = [Evaluation(maker=MAKER, outcomes={"t/acc": Outcome(values=(1.0,), items=items)}) for items in "ab"]
    with pytest.raises(GoldenFileError, match=r"have other items in t/acc\. Run both anew, with the same tasks"):
        pair(*sides)


def test_other_sets_and_items_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GoldenFileError, match="no set in common"):
        pair(of(choices=(1.0,)), of(answers=(1.0,)))
    with pytest.raises(GoldenFileError, match="have 1 and 2 items in choices: tokenizers or sets differ"):
        pair(of(choices=(1.0,)), of(choices=(1.0, 0.0)))
    with pytest.raises(GoldenFileError, match="cannot be read"):
        read_evaluation(tmp_path / "absent")
    (tmp_path / "x").write_text("[]")
    with pytest.raises(GoldenFileError, match="is no evaluation"):
        read_evaluation(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"\xa0" * 1000)
    with pytest.raises(
        GoldenFileError, match=r"is no evaluation, since it is no text \(invalid start byte\)\. Make one"
    ):
        read_evaluation(tmp_path / "x")
    (tmp_path / "x").write_text('{"version": 9}')
    with pytest.raises(GoldenFileError, match="of version 9, but this Cardan reads up to 2"):
        read_evaluation(tmp_path / "x")
    of(choices=(1.0,), answers=()).write(tmp_path / "x")
    with pytest.raises(GoldenFileError, match=r"holds no outcome of answers\. Make it anew"):
        read_evaluation(tmp_path / "x")


def test_sets_are_compared_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There is no such model, which would be said once it is looked for."""
    of(choices=(1.0,)).write(tmp_path / "x")
    against = ["accuracy", "eval", "--model", str(tmp_path / "absent"), "--against", str(tmp_path / "x")]
    assert app.run([*against, "--set", "answers"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "no set in common: choices against answers. Run both with the same --set or --harness-tasks" in said
    assert app.run([*against, "--harness-tasks", "arc_easy,gsm8k"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "no set in common: choices against arc_easy, gsm8k. Run both with the same --set or" in said
    assert app.run([*against, "--set", "poems"]) == 2
    assert "--set must be one of" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("asked", "task", "shares"),
    [
        (("mmlu",), "mmlu", True),
        (("mmlu",), "mmlu_anatomy", True),
        (("mmlu_anatomy",), "mmlu", True),
        (("mmlu_anatomy",), "mmlu_*", True),
        (("mmlu",), "gsm8k", False),
        (("mmlu",), "mm", False),
        ((), "a_group_of_other_names", True),
    ],
)
def test_tasks_are_compared_before_anything_runs(
    asked: tuple[str, ...], task: str, shares: bool, tmp_path: Path
) -> None:
    """Groups become sets of other names; a file that does not say how its tasks were named is taken."""
    Evaluation(maker=MAKER, outcomes={"mmlu_anatomy/acc": Outcome(values=(1.0,))}, asked=asked).write(tmp_path / "x")
    kept = read_evaluation(tmp_path / "x")
    if shares:
        check_in_common(kept, (), (task,))
    else:
        with pytest.raises(GoldenFileError, match=f"no set in common: mmlu_anatomy/acc against {task}"):
            check_in_common(kept, (), (task,))


def test_perplexities_of_another_tokenizer_are_refused_before_anything_runs(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(*_: object) -> None:
        raise AssertionError("it ran")

    monkeypatch.setattr("cardan.cli.evaluating.evaluate", evaluate)
    maker = replace(MAKER, tokenizer="another", model="m")
    values = Outcome(values=(-1.0,), measure="perplexity")
    Evaluation(maker=maker, outcomes={"perplexity": values}).write(tmp_path / "x")
    flags = ["--platform", "cpu", "--model", str(model), "--set", "perplexity", "--against", str(tmp_path / "x")]
    assert app.run(["accuracy", "eval", *flags]) == 1
    assert "their tokenizers differ: that of m is another" in " ".join(capsys.readouterr().err.split())


@pytest.mark.model
@pytest.mark.slow
def test_a_real_model_answers(smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SmolLM2 knows what children know, and is the same as itself."""
    out = tmp_path / "a.json"
    flags = ["--model", str(smollm2_path), "--platform", "cpu", "--max-total-tokens", "4096"]
    sets = ["--set", "choices", "--set", "answers"]
    assert app.run(["accuracy", "eval", *flags, *sets, "--out", str(out)]) == 0
    kept = read_evaluation(out)
    assert score(kept.outcomes["choices"]).low > 0.6, "by chance a quarter is right"
    assert score(kept.outcomes["answers"]).low > 0.3
    assert app.run(["accuracy", "eval", *flags, "--set", "answers", "--against", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "no difference beyond chance, p = 1" in shown


def test_outcomes_are_kept_and_read(tmp_path: Path) -> None:
    made = replace(of(choices=(1.0, 0.0)), maker=replace(MAKER, settings={"graph": [True, "flag"]}))
    made.write(tmp_path / "x.json")
    found = read_evaluation(tmp_path / "x.json")
    assert found.outcomes == made.outcomes
    assert json.loads(json.dumps(found.maker.to_json())) == json.loads(json.dumps(made.maker.to_json()))


def test_unknown_sets_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llama, tmp_path / "m")
    config = tiny_config(tmp_path / "m", "cpu")
    tokenizer = tokenizer_for(config, required=False)
    with pytest.raises(ConfigError, match="--set must be one of perplexity, choices, answers, got 'poems'"):
        evaluate(config, tokenizer, ("poems",))  # type: ignore[arg-type]
