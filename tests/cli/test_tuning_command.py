"""``cardan tune`` as a user runs it, on the platform without hardware, and what ``cardan plan`` says then."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tuned_platforms import FakeTuner, TunedNull

from cardan.cli.app import EXIT_CONFIG, EXIT_FAILED, run
from cardan.testing.null_platform import NullPlatform

PLAN = ("plan", "--platform", "null", "--model", "null", "--json")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("CARDAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> FakeTuner:
    """What the platform without hardware measures by."""
    found = FakeTuner({"few": 6, "many": 20})
    monkeypatch.setattr(NullPlatform, "tuner", lambda self, device: found)
    monkeypatch.setattr(NullPlatform, "tuned", lambda self, numbers: TunedNull(found).tuned(numbers))
    return found


def planned(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert run(PLAN) == 0
    return json.loads(capsys.readouterr().out)


def test_tuning_is_kept_and_planned_with(tuner: FakeTuner, capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    before = planned(capsys)["settings"]["tuning"]
    assert (before["value"], before["source"]) == ("default", "default")
    assert run(["tune", "--platform", "null"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^few +6 +4 +rows up to which", out, re.MULTILINE)
    assert re.search(r"^many +20 +16 +rows from which on", out, re.MULTILINE)
    assert f"in {cache / 'tuning' / 'null'}" in out
    after = planned(capsys)["settings"]["tuning"]
    assert (after["value"], after["source"]) == ("tuned", "measured")
    assert re.fullmatch(r"tuned on \d{4}-\d\d-\d\d for Some CPU \(2 threads\), k1", after["why"])


def test_numbers_that_are_not_measured_again_are_kept(tuner: FakeTuner, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "--platform", "null"]) == 0
    tuner.results = {"few": 2}
    capsys.readouterr()
    assert run(["tune", "--platform", "null"]) == 0
    assert re.search(r"^many +20 \(earlier\) +16 ", capsys.readouterr().out, re.MULTILINE)
    assert run(["tune", "--platform", "null", "--json"]) == 0
    kept = json.loads(capsys.readouterr().out)
    assert kept["numbers"] == {"few": 2, "many": 20}
    assert kept["measured"] == ["few"]


def test_a_table_that_is_not_used_is_a_note_of_the_plan(tuner: FakeTuner, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "--platform", "null", "--json"]) == 0
    path = Path(json.loads(capsys.readouterr().out)["path"])
    path.write_text(path.read_text().replace('"k1"', '"k0"'))
    plan = planned(capsys)
    assert plan["settings"]["tuning"]["value"] == "default"
    (note,) = [note for note in plan["notes"] if "is not used" in note]
    assert "it was measured for kernels k0, and here is k1. Run `cardan tune --platform null` to measure anew" in note


def test_a_platform_without_tuning_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "--platform", "null"]) == EXIT_CONFIG
    message = "Platform 'null' offers nothing to tune on null device: its kernels choose by themselves."
    assert message in " ".join(capsys.readouterr().err.split())
    assert planned(capsys)["settings"]["tuning"] == {
        "value": None,
        "source": "platform",
        "why": "the platform offers nothing to tune",
    }


def test_an_unknown_platform_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "--platform", "gone"]) == EXIT_FAILED
    assert "No platform plugin is named 'gone'" in capsys.readouterr().err


def test_an_unknown_option_of_the_platform_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "--platform", "null", "--platform-option", "colour=red"]) == EXIT_CONFIG
    assert "colour" in capsys.readouterr().err


@pytest.mark.parametrize(
    "results", [{"gone": 4}, {"few": 65}, {"few": 4.0}, {"few": True}, {"few": np.float64(4)}, {"few": "4"}]
)
def test_results_that_no_start_would_take_are_not_kept(
    tuner: FakeTuner, results: dict[str, Any], capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    tuner.results = results
    assert run(["tune", "--platform", "null"]) == EXIT_FAILED
    assert "Tell the plugin's maker." in capsys.readouterr().err
    assert not cache.exists()


def test_numpys_whole_numbers_are_kept_as_whole_numbers(
    tuner: FakeTuner, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    tuner.results = {"few": np.int64(6)}  # type: ignore[dict-item]
    assert run(["tune", "--platform", "null", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["numbers"] == {"few": 6}
    assert planned(capsys)["settings"]["tuning"]["value"] == "tuned"


def test_a_model_without_linears_is_refused(tuner: FakeTuner, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "--platform", "null", "--model", "null"]) == EXIT_CONFIG
    assert "Model 'null' has no linears to measure with." in capsys.readouterr().err


def test_a_model_for_which_there_is_no_choice_is_refused(tuner: FakeTuner, capsys: pytest.CaptureFixture[str]) -> None:
    tuner.results = {}
    assert run(["tune", "--platform", "null"]) == EXIT_CONFIG
    assert "Platform 'null' measured nothing" in capsys.readouterr().err


def test_a_busy_machine_is_said(
    tuner: FakeTuner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (2.0, 0.0, 0.0))
    assert run(["tune", "--platform", "null"]) == 0
    assert "2.0 programs ran on average of the last minute" in capsys.readouterr().err
    monkeypatch.setattr("os.getloadavg", lambda: (0.1, 0.0, 0.0))
    assert run(["tune", "--platform", "null"]) == 0
    assert "programs ran" not in capsys.readouterr().err


@pytest.mark.model
def test_a_models_linears_are_measured_in_their_formats(
    tuner: FakeTuner, monkeypatch: pytest.MonkeyPatch, smollm2_path: Path
) -> None:
    monkeypatch.setattr(NullPlatform, "reads_weights", True)
    assert run(["tune", "--platform", "null", "--model", str(smollm2_path)]) == 0
    found = {(it.spec.name, it.fmt, it.spec.out_features, it.spec.in_features) for it in tuner.linears}
    assert ("layers.0.down", "Q4_1", 576, 1536) in found
    assert ("layers.29.gate_up", "Q4_1", 3072, 576) in found
    assert {name for name, *_ in found if name == "head"} == {"head"}
    assert len({name for name, *_ in found}) == 30 * 4 + 1
