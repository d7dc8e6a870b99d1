"""Without cardan-native everything still works on the CPU, by torch, and the plan says that it is slower and why."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cardan.config import EngineConfig, ModelConfig, PlatformConfig
from cardan.engine.preparation import resolve_plan
from cardan.testing import write_tiny_model
from cardan_cpu.kernels import choose

pytest.importorskip("torch")

PULLED_OUT = "import sys\nsys.modules['cardan_native'] = None\n"
"""What a process imports first, so that no import finds the native kernels."""

ASKED = ("--platform", "cpu", "--max-total-tokens", "512", "--context-length", "128")


def cardan(folder: Path | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command, and its processes, without the native kernels where ``folder`` has the file that hides them."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    if folder is not None:
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-c", "from cardan.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=variables)


@pytest.fixture
def pulled_out(tmp_path: Path) -> Path:
    folder = tmp_path / "pulled_out"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PULLED_OUT)
    return folder


def planned(model: Path) -> Any:
    return resolve_plan(
        EngineConfig(
            model=ModelConfig(model=str(write_tiny_model(model)), random_weights=0),
            platform=PlatformConfig(platform="cpu"),
        )
    )


def test_the_plan_says_that_torch_computes_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cardan_native", None)
    plan = planned(tmp_path / "tiny")
    assert plan.value("decode_attention_backend") == "torch"
    assert "torch's kernels" in plan.device.detail
    assert (
        "torch's kernels compute, which are slower than the native ones: cardan-native is not installed; "
        "`pip install ./kernels/native` builds it from Cardan's sources"
    ) in plan.notes
    assert plan.settings["tuning"].value is None


@pytest.mark.skipif(choose("native").kind is None, reason="needs the native kernels")
def test_with_the_native_kernels_no_plan_says_so(tmp_path: Path) -> None:
    assert not any("slower" in note for note in planned(tmp_path / "tiny").notes)


@pytest.mark.slow
@pytest.mark.model
def test_a_model_says_the_same_without_the_native_kernels(pulled_out: Path, smollm2_path: Path) -> None:
    model = ("--model", str(smollm2_path), *ASKED)
    done = cardan(pulled_out, "plan", *model, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert "torch's kernels" in plan["device"]["detail"]
    assert any("slower than the native ones" in note for note in plan["notes"])
    assert {item["fmt"]: item["native"] for item in plan["formats"]}["Q4_1"] is False
    prompt = ("generate", "The capital of France is", *model, "--max-new-tokens", "8", "--temperature", "0")
    without = cardan(pulled_out, *prompt)
    assert without.returncode == 0, without.stderr
    assert re.search(r"\bParis\b", without.stdout)
    if choose("native").kind is not None:
        assert without.stdout == cardan(None, *prompt).stdout
