"""The check for Macs: its arithmetic and refusals, and all of it on MLX's CPU build."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_runs_may_part_once_where_two_tokens_are_close(load_module: Any) -> None:
    module = load_module("greedy_tokens")

    def run(*tokens: int, margins: tuple[float, ...] = (1.0, 0.01, 1.0)) -> Any:
        return module.Continuation("p", list(tokens), list(margins))

    want = [run(1, 2, 3), run(4, 5, 6)]
    assert module.compare(want, want) == {
        "prompts": 2, "tokens_each": 3, "equal": 2, "parted": [], "passed": True,
    }  # fmt: skip
    narrow = module.compare([run(1, 9, 9), run(4, 5, 6)], want)
    assert narrow["parted"] == [{"prompt": "p", "step": 1, "margin": 0.01}]
    assert narrow["passed"]
    assert not module.compare([run(9, 2, 3), run(4, 5, 6)], want)["passed"]
    assert not module.compare([run(1, 9, 3), run(4, 9, 6)], want)["passed"]


def test_every_prompt_is_recorded(load_module: Any) -> None:
    module = load_module("greedy_tokens")
    assert tuple(entry.prompt for entry in module.recorded()) == module.PROMPTS
    assert {(len(entry.tokens), len(entry.margins)) for entry in module.recorded()} == {(module.TOKENS, module.TOKENS)}


def test_the_file_is_named_for_the_chip(load_module: Any) -> None:
    assert load_module("mac_check").file_name("Apple M3 Max") == "mac-apple-m3-max.json"


def test_what_is_no_evidence_is_not_written_among_it(load_module: Any, monkeypatch: Any, capsys: Any) -> None:
    module = load_module("mac_check")
    for flag in ("--cpu-build", "--quick"):
        assert module.main([flag]) == 2
        assert "Name another place with --folder" in capsys.readouterr().err
    monkeypatch.setattr(module, "has_metal", lambda: False)
    assert module.main([]) == 2
    assert "this needs a Mac with Metal" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.model
def test_all_of_it_on_the_cpu_build(smollm2_path: Path, tmp_path: Path) -> None:
    flags = ["--cpu-build", "--quick", "--model", str(smollm2_path), "--folder", str(tmp_path)]
    done = subprocess.run([sys.executable, str(FOLDER / "mac_check.py"), *flags], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = tmp_path.glob("mac-*.json")
    found = json.loads(file.read_text())
    assert found["passed"]
    assert not found["metal"]
    assert found["greedy"]["equal"] == 2
    assert found["conformance"]["outcomes"]
    assert {"1 rows", "8 rows"} == set(found["times"])
