"""lm-evaluation-harness through the server: its likelihoods and answers are those of the bundled sets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cardan.accuracy.evaluation import evaluate
from cardan.accuracy.recording import tokenizer_for
from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "harness.py"
TASKS = json.loads(resources.files("cardan.accuracy").joinpath("tasks.json").read_text(encoding="utf-8"))


def run_script(*flags: object, timeout_s: float = 1500) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, flags)]
    # what it asks lies on this machine
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=env)


def test_without_the_harness_it_is_said_where_to_get_it(tmp_path: Path) -> None:
    done = run_script("--harness", tmp_path / "none", "--out", tmp_path)
    assert done.returncode == 2
    assert "none is not there; make accuracy-harness installs it." in done.stderr


def test_examples_of_answers_are_those_of_the_bundled_set() -> None:
    """The file of the task repeats them, since the harness takes them from nowhere else."""
    text = (ROOT / "benchmarks" / "tasks" / "cardan_answers.yaml").read_text(encoding="utf-8")
    assert f"description: {json.dumps(TASKS['shots'])}\n" in text


@pytest.fixture(scope="module")
def harness() -> Path:
    named = os.environ.get("CARDAN_TEST_HARNESS", "")
    if not Path(named).is_file():
        pytest.skip("CARDAN_TEST_HARNESS names no lm_eval; make accuracy-harness installs it and sets it")
    return Path(named)


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    (path,) = folder.glob(f"*/samples_{task}_*.jsonl")
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted(found, key=lambda sample: int(sample["doc_id"]))


def scores(folder: Path, task: str) -> dict[str, Any]:
    (path,) = folder.glob("*/results_*.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["results"][task]
    return found


def likeliest(choices: Sequence[str], sums: Sequence[float]) -> str:
    """By its bytes, the blank before it included, as the bundled set chooses."""
    return choices[
        int(np.argmax([value / len(f" {choice}".encode()) for choice, value in zip(choices, sums, strict=True)]))
    ]


@pytest.mark.model
@pytest.mark.peers
@pytest.mark.timeout(1800)
def test_completions_give_what_the_engine_gives(harness: Path, smollm2_path: Path, tmp_path: Path) -> None:
    served = ["--platform", "cpu", "--model", smollm2_path, "--dtype", "float32", "--max-total-tokens", "4096"]
    done = run_script("--harness", harness, "--out", tmp_path, "--", *served)
    assert done.returncode == 0, done.stderr[-3000:]
    config = EngineConfig(
        model=ModelConfig(model=str(smollm2_path), dtype="float32"),
        platform=PlatformConfig(platform="cpu"),
        cache=CacheConfig(max_total_tokens=4096),
    )
    tokenizer = tokenizer_for(config, required=True)
    assert tokenizer is not None
    ours = evaluate(config, tokenizer, ("choices", "answers")).outcomes
    chosen = []
    for item, sample in zip(TASKS["choices"], samples(tmp_path, "cardan_choices"), strict=True):
        chosen.append(likeliest(item["choices"], [float(value) for ((value, _),) in sample["resps"]]))
    assert tuple(chosen) == ours["choices"].said
    answers = [sample["filtered_resps"][0] for sample in samples(tmp_path, "cardan_answers")]
    assert tuple(answers) == ours["answers"].said
    share = scores(tmp_path, "cardan_answers")["exact_match,stripped"]
    assert share == pytest.approx(np.mean(ours["answers"].values))


@pytest.mark.model
@pytest.mark.peers
@pytest.mark.timeout(900)
def test_chats_are_answered(harness: Path, smollm2_path: Path, tmp_path: Path) -> None:
    served = ["--platform", "cpu", "--model", smollm2_path, "--max-total-tokens", "4096"]
    asked = ["--tasks", "cardan_answers", "--limit", 3, "--chat"]
    done = run_script("--harness", harness, "--out", tmp_path, *asked, "--", *served)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(sample["resps"][0][0].strip() for sample in samples(tmp_path, "cardan_answers"))
    assert 0 <= scores(tmp_path, "cardan_answers")["exact_match,stripped"] <= 1
