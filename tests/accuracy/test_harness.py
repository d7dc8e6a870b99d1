"""lm-evaluation-harness: how it is found and called, what is read of what it keeps, and that it agrees with the
bundled sets when it asks a real server."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cardan.accuracy.evaluation import evaluate
from cardan.accuracy.harness import (
    Harness,
    HarnessError,
    find_harness,
    kept_in,
    read_outcomes,
    run_harness,
    task_folder,
    task_names,
)
from cardan.accuracy.outcomes import read_evaluation, score
from cardan.accuracy.recording import tokenizer_for
from cardan.cli import app
from cardan.cli.measuring import check_writable
from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig
from cardan.errors import ConfigError

TASKS = json.loads(resources.files("cardan.accuracy").joinpath("tasks.json").read_text(encoding="utf-8"))
STAMP = "2026-01-02T03-04-05.678901"


def write_run(folder: Path, task: str, samples: Sequence[dict[str, Any]], results: dict[str, Any]) -> Path:
    """Files as the harness keeps them."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = [
        {"doc_id": number, "doc_hash": f"h{number}", "filter": "none", "filtered_resps": ["x"], **sample}
        for number, sample in enumerate(samples)
    ]
    lines = "\n".join(json.dumps(sample) for sample in reversed(whole))
    (folder / f"samples_{task}_{STAMP}.jsonl").write_text(lines, encoding="utf-8")
    path = folder / f"results_{STAMP}.json"
    path.write_text(json.dumps({"configs": {task: {}, "a_group": {}}, "results": {task: results}}), encoding="utf-8")
    return path


def program(folder: Path, code: str) -> Path:
    """A stand-in for lm_eval."""
    path = folder / "lm_eval"
    path.write_text(f"#!{sys.executable}\nimport os, pathlib, sys\n{code}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def harness_of(path: Path, folder: Path, **changes: Any) -> Harness:
    return Harness(program=path, tasks=("a", "b"), folder=folder, out=folder, **changes)


def test_it_is_found_where_it_is_named_or_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = program(tmp_path, "")
    assert find_harness(there) == there
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    assert find_harness(None) == there
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))
    with pytest.raises(ConfigError, match=r"there is no lm_eval in .*elsewhere nor on the PATH\. Install it: pip inst"):
        find_harness(None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_harness(None) == there
    with pytest.raises(ConfigError, match=r"--harness .*none is no program that can be run\. Install it: pip install"):
        find_harness(tmp_path / "none")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--harness-limit", "3"], "Without --harness-tasks, --harness-limit has no effect"),
        (["--harness-tasks", "a", "--harness-limit", "0"], "--harness-limit must be at least 1, got 0"),
        (["--harness-tasks", "a,,b"], "--harness-tasks has an empty name. Pass names such as arc_easy,gsm8k"),
        (["--harness-tasks", "a", "--harness-folder", "{folder}/none"], "none is no folder. Name one with task files"),
        (["--harness-tasks", "a", "--harness", "{folder}/none"], "none is no program that can be run"),
        (["--harness-tasks", "a", "--harness-out", "{file}"], "--harness-out {file} cannot be made: File exists"),
        (["--out", "{folder}/none/x"], "--out {folder}/none/x is in {folder}/none, which is no folder"),
        (["--out", "{folder}"], "--out {folder} is a folder"),
    ],
)
def test_wrong_uses_are_said_before_anything_runs(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no such model, which would be said once it is looked for."""
    places = {"folder": tmp_path, "file": program(tmp_path, "")}
    found = ["--harness", str(places["file"])] if "--harness-tasks" in flags and "--harness" not in flags else []
    given = [text.format(**places) for text in flags]
    assert app.run(["accuracy", "eval", "--model", str(tmp_path / "absent"), *found, *given]) == 2
    said = capsys.readouterr().err.replace("\n", "").replace(" ", "")
    assert message.format(**places).replace(" ", "") in said


def test_names_come_one_by_one_or_between_commas() -> None:
    assert task_names(("arc_easy,gsm8k", "arc_easy", "b")) == ("arc_easy", "gsm8k", "b")


def test_it_is_called_for_completions_and_chats(tmp_path: Path) -> None:
    said = harness_of(tmp_path / "lm_eval", tmp_path).command("http://h:1", "m", 512)
    assert said[1:4] == ["run", "--model", "local-completions"]
    assert "base_url=http://h:1/v1/completions," in said[5]
    assert said[5].endswith("tokenizer_backend=remote,max_length=512")
    assert said[said.index("--tasks") + 1] == "a,b"
    said = harness_of(tmp_path / "lm_eval", tmp_path, chat=True, limit=2).command("http://h:1", "m", 512)
    assert "local-chat-completions" in said
    assert "--apply_chat_template" in said
    assert said[-2:] == ["--limit", "2"]
    with pytest.raises(HarnessError, match=r"no commas in a model's name, got 'a,b'\. Pass --served-model-name"):
        harness_of(tmp_path / "lm_eval", tmp_path).command("http://h:1", "a,b", 512)


def test_logs_stay_where_a_run_without_a_folder_failed() -> None:
    with kept_in(None) as fine:
        (fine / "lm_eval.log").touch()
    assert not fine.exists()
    made: list[Path] = []

    def fail(*, logged: bool) -> None:
        with kept_in(None) as folder:
            made.append(folder)
            if logged:
                (folder / "lm_eval.log").touch()
            raise HarnessError("it failed")

    for logged in (True, False):
        with pytest.raises(HarnessError):
            fail(logged=logged)
        assert made[-1].exists() is logged
    shutil.rmtree(made[0])


def test_a_file_that_may_not_be_written_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr("os.access", lambda path, _mode: asked.append(Path(path)))
    with pytest.raises(ConfigError, match=r"--out .*may not be written\. Name a file"):
        check_writable(out=tmp_path / "new")
    (tmp_path / "old").touch()
    with pytest.raises(ConfigError, match="may not be written"):
        check_writable(out=tmp_path / "old")
    assert asked == [tmp_path, tmp_path / "old"]


def test_every_metric_of_items_is_read(tmp_path: Path) -> None:
    metrics = ["acc", "f1", "perplexity", "word_perplexity", "odd"]
    rows = [(1.0, 0.5, -1.0, [-3.0, 2], 0.1), (0.0, 0.25, -2.0, [-4.0, 3], 0.2), (1.0, 0.75, -3.0, [-5.0, 4], 0.3)]
    samples = [{"metrics": metrics, **dict(zip(metrics, row, strict=True))} for row in rows]
    reported = {"acc,none": 2 / 3, "f1,none": 0.5, "perplexity,none": np.exp(2.0), "word_perplexity,none": 9.0}
    found = read_outcomes(write_run(tmp_path, "t", samples, {**reported, "odd,none": 7.0}))
    assert {name: (outcome.measure, outcome.values) for name, outcome in found.items()} == {
        "t/acc": ("share", (1.0, 0.0, 1.0)),
        "t/f1": ("mean", (0.5, 0.25, 0.75)),
        "t/perplexity": ("perplexity", (-1.0, -2.0, -3.0)),
    }
    assert len({outcome.items for outcome in found.values()}) == 1
    assert found["t/acc"].said == ("x", "x", "x")
    for name, metric in (("t/acc", "acc,none"), ("t/f1", "f1,none"), ("t/perplexity", "perplexity,none")):
        assert score(found[name]).value == pytest.approx(reported[metric])


def test_filters_have_scores_of_their_own(tmp_path: Path) -> None:
    samples = [
        {"doc_id": item, "filter": sieve, "metrics": ["exact_match"], "exact_match": value}
        for item, values in enumerate(((1.0, 0.0), (1.0, 1.0)))
        for sieve, value in zip(("strict", "flexible"), values, strict=True)
    ]
    path = write_run(tmp_path, "t", samples, {"exact_match,strict": 1.0, "exact_match,flexible": 0.5})
    found = read_outcomes(path)
    assert found["t/exact_match,strict"].values == (1.0, 1.0)
    assert found["t/exact_match,flexible"].values == (0.0, 1.0)


def test_what_is_not_the_harnesss_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="is not what lm-evaluation-harness keeps"):
        read_outcomes(tmp_path / "results_x.json")
    path = write_run(tmp_path, "t", [{"metrics": ["bleu"], "bleu": ["a", "b"]}], {"bleu,none": 3.0})
    with pytest.raises(HarnessError, match=r"has no metric with a score of every item\. Choose other tasks"):
        read_outcomes(path)
    path = write_run(tmp_path, "t", [{"metrics": ["acc"]}], {"acc,none": 3.0})
    with pytest.raises(HarnessError, match=r"is not what lm-evaluation-harness keeps .KeyError"):
        read_outcomes(path)


def test_a_run_is_read_and_a_failed_one_said(tmp_path: Path) -> None:
    made = tmp_path / "kept"
    write_run(made, "t", [{"metrics": ["acc"], "acc": 1.0}], {"acc,none": 1.0})
    keeps = f"""
out = pathlib.Path(sys.argv[sys.argv.index("--output_path") + 1]) / "m"
assert os.getcwd() == {str(tmp_path)!r} and "127.0.0.1" in os.environ["NO_PROXY"]
out.mkdir()
for file in pathlib.Path({str(made)!r}).iterdir():
    (out / file.name).write_bytes(file.read_bytes())
"""
    fine = harness_of(program(tmp_path, keeps), tmp_path)
    assert run_harness(fine, "http://h", "m", 9)["t/acc"].values == (1.0,)
    with pytest.raises(HarnessError, match=r"(?s)ended with exit code 1.*lm_eval.log.*FileExistsError"):
        run_harness(fine, "http://h", "m", 9)
    with pytest.raises(HarnessError, match="kept no results"):
        run_harness(harness_of(program(tmp_path, ""), tmp_path), "http://h", "m", 9)
    with pytest.raises(HarnessError, match="cannot be run: No such file"):
        run_harness(harness_of(tmp_path / "none", tmp_path), "http://h", "m", 9)


def test_examples_of_answers_are_those_of_the_bundled_set() -> None:
    """The file of the task repeats them, since the harness takes them from nowhere else."""
    text = (task_folder(None) / "cardan_answers.yaml").read_text(encoding="utf-8")
    assert f"description: {json.dumps(TASKS['shots'])}\n" in text


@pytest.fixture(scope="module")
def harness() -> Path:
    named = os.environ.get("CARDAN_TEST_HARNESS", "")
    if not Path(named).is_file():
        pytest.skip("CARDAN_TEST_HARNESS names no lm_eval; make accuracy-peers installs it and sets it")
    return Path(named)


def samples_in(folder: Path, task: str) -> list[dict[str, Any]]:
    (path,) = folder.glob(f"*/samples_{task}_*.jsonl")
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted(found, key=lambda sample: int(sample["doc_id"]))


def likeliest(choices: Sequence[str], sums: Sequence[float]) -> str:
    """By its bytes, the blank before it included, as the bundled set chooses."""
    return choices[
        int(np.argmax([value / len(f" {choice}".encode()) for choice, value in zip(choices, sums, strict=True)]))
    ]


def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it asks lies on this machine."""
    for name, value in (("HF_HUB_OFFLINE", "1"), ("HF_DATASETS_OFFLINE", "1"), ("HF_HOME", str(tmp_path / "hf"))):
        monkeypatch.setenv(name, value)


@pytest.mark.model
@pytest.mark.peers
@pytest.mark.timeout(1800)
def test_completions_give_what_the_engine_gives(
    harness: Path,
    smollm2_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    offline(monkeypatch, tmp_path)
    out, kept = tmp_path / "out", tmp_path / "harness.json"
    served = ["--platform", "cpu", "--model", str(smollm2_path), "--dtype", "float32", "--max-total-tokens", "4096"]
    asked = ["--harness", str(harness), "--harness-tasks", "cardan_choices,cardan_answers", "--harness-out", str(out)]
    assert app.run(["accuracy", "eval", *served, *asked, "--out", str(kept)]) == 0, capsys.readouterr().err
    by_harness = read_evaluation(kept).outcomes
    config = EngineConfig(
        model=ModelConfig(model=str(smollm2_path), dtype="float32"),
        platform=PlatformConfig(platform="cpu"),
        cache=CacheConfig(max_total_tokens=4096),
    )
    tokenizer = tokenizer_for(config, required=True)
    assert tokenizer is not None
    ours = evaluate(config, tokenizer, ("choices", "answers")).outcomes
    chosen = []
    for item, sample in zip(TASKS["choices"], samples_in(out, "cardan_choices"), strict=True):
        chosen.append(likeliest(item["choices"], [float(value) for ((value, _),) in sample["resps"]]))
    assert tuple(chosen) == ours["choices"].said
    assert by_harness["cardan_answers/exact_match,stripped"].said == ours["answers"].said
    assert by_harness["cardan_answers/exact_match,stripped"].values == ours["answers"].values
    assert {"cardan_choices/acc", "cardan_choices/acc_norm"} < set(by_harness)
    again = ["--harness", str(harness), "--harness-tasks", "cardan_answers", "--against", str(kept)]
    assert app.run(["accuracy", "eval", *served, *again]) == 0, capsys.readouterr().err
    assert "no difference beyond chance, p = 1" in capsys.readouterr().out


@pytest.mark.model
@pytest.mark.peers
@pytest.mark.timeout(900)
def test_chats_are_answered(harness: Path, smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline(monkeypatch, tmp_path)
    served = ["--platform", "cpu", "--model", str(smollm2_path), "--max-total-tokens", "4096"]
    asked = ["--harness-tasks", "cardan_answers", "--harness-limit", "3", "--harness-chat", "--harness", str(harness)]
    kept = tmp_path / "x.json"
    assert app.run(["accuracy", "eval", *served, *asked, "--out", str(kept)]) == 0
    found = read_evaluation(kept).outcomes["cardan_answers/exact_match,stripped"]
    assert len(found.values) == 3
    assert all(found.said)


@pytest.mark.model
@pytest.mark.peers
@pytest.mark.timeout(900)
def test_a_task_that_it_does_not_know_is_said(
    harness: Path, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = ["--platform", "cpu", "--model", str(smollm2_path), "--max-total-tokens", "4096"]
    assert app.run(["accuracy", "eval", *served, "--harness", str(harness), "--harness-tasks", "no_such_task"]) == 1
    said = capsys.readouterr().err
    assert "ended with exit code" in said
    assert "no_such_task" in said
