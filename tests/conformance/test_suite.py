"""The suite's own mechanics: what is collected, how outcomes and reports look, and how it is run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import faulty_platforms as faulty
import pytest

from cardan.cli.app import run
from cardan.errors import ConfigError
from cardan.models import MODEL_FAMILIES
from cardan.testing.conformance import (
    PARTS,
    TINY_CONFIGS,
    Check,
    CheckError,
    NotApplicableError,
    Status,
    Subject,
    collect,
    run_check,
    run_suite,
)
from cardan.testing.conformance.tiny_configs import WRAPPERS
from cardan.testing.null_platform import platform as null_platform


@pytest.fixture(scope="module")
def cpu() -> Any:
    with Subject(faulty.CpuCopy(faulty.OneThread), quick=True) as subject:
        yield subject


def outcome_of(subject: Subject, run: Any, **changes: Any) -> Any:
    return run_check(subject, Check(part="ops", name="made-up", run=run, **changes))


def test_every_part_has_checks_with_names_of_their_own(cpu: Subject) -> None:
    checks = collect(cpu)
    assert {check.part for check in checks} == set(PARTS)
    ids = [check.id for check in checks]
    assert len(ids) == len(set(ids))
    assert len(collect(Subject(cpu.platform))) > len(ids), "a full run has more"


def test_parts_and_beginnings_choose_checks(cpu: Subject) -> None:
    assert {check.part for check in collect(cpu, ("memory",))} == {"memory"}
    assert [check.id for check in collect(cpu, ("ops/rope[float32]",))] == ["ops/rope[float32]"]
    with pytest.raises(ConfigError, match=r"must begin with one of capabilities, .*got 'speed'"):
        collect(cpu, ("speed",))
    with pytest.raises(ConfigError, match="matches no check"):
        collect(cpu, ("ops/no-such-operation",))


def test_what_a_check_raises_is_its_outcome(cpu: Subject) -> None:
    def fails(_: Subject) -> None:
        raise CheckError("got 1, expected 2")

    def does_not_apply(_: Subject) -> None:
        raise NotApplicableError("no such feature")

    def breaks(_: Subject) -> None:
        raise ZeroDivisionError("oh")

    failed, skipped, broken = (outcome_of(cpu, check) for check in (fails, does_not_apply, breaks))
    assert (failed.status, failed.detail) == (Status.FAILED, "got 1, expected 2")
    assert (skipped.status, skipped.detail) == (Status.SKIPPED, "no such feature")
    assert broken.status is Status.FAILED
    assert broken.detail.startswith("raised ZeroDivisionError: oh (")
    assert "test_suite.py" in broken.detail
    assert outcome_of(cpu, lambda _: None).status is Status.PASSED


def test_a_device_of_level_1_is_tried_where_that_is_possible() -> None:
    with Subject(null_platform, quick=True) as subject:
        report = run_suite(
            subject, ("memory", "ops", "linear", "kv", "sampler", "end_to_end/chunked", "end_to_end/cold")
        )
    assert report.passed
    assert report.level == 1
    assert not report.benchmarks
    counts = report.counts()
    assert set(counts["ops"]) == {"skipped"}
    assert counts["end_to_end"]["passed"] == 2
    assert any("shows no ops table" in reason for reason in report.skips())


def test_a_report_is_json_and_says_what_there_is(cpu: Subject) -> None:
    seen = []
    report = run_suite(cpu, ("memory", "ops/silu"), seen.append)
    assert list(report.outcomes) == seen
    data = json.loads(json.dumps(report.to_json()))
    assert data["passed"]
    assert data["level"] == 2
    assert data["api"] == 1
    assert {outcome["status"] for outcome in data["outcomes"]} <= {"passed", "failed", "skipped"}
    assert "attention:torch" in data["evidence"]["hardware"]
    assert data["benchmarks"]["linear"] > 0


def test_nothing_passed_is_not_passing() -> None:
    with Subject(null_platform) as subject:
        assert not run_suite(subject, ("ops",)).passed


def test_the_command_prints_a_report_card(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    assert (
        run(["conform", "--platform", "null", "--quick", "--only", "memory", "--only", "linear", "--json", str(file)])
        == 0
    )
    printed = capsys.readouterr().out
    assert "conformance of null" in printed
    assert "shows no ops table" in printed
    assert "null conforms: 9 passed, 0 failed" in printed
    assert json.loads(file.read_text())["platform"] == "null"


def test_the_command_fails_with_the_platform(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    floor = faulty.CpuCopy(faulty.FloorDevice)
    monkeypatch.setattr("cardan.cli.conforming.choose_platform", lambda name: floor)
    assert run(["conform", "--only", "memory"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED memory/no-memory-is-an-error-not-a-floor: 0 bytes are free: a pool of 4096 slots" in printed
    assert "does not conform" in printed


def test_the_command_refuses_an_unknown_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["conform", "--platform", "null", "--only", "speed"]) == 2
    assert "must begin with one of" in capsys.readouterr().err


def test_pytest_runs_the_same_checks(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:asyncio",
        "--pyargs",
        "cardan.testing",
    ]
    done = subprocess.run(
        [*command, "--platform", "null", "--conformance-only", "memory"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 passed" in done.stdout
    without = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 skipped" in without.stdout


def test_another_device_is_opened_after_a_release(cpu: Subject) -> None:
    first = cpu.device
    cpu.release()
    assert cpu.device is not first


def test_a_model_of_a_plugin_is_tried_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = "StrangerForCausalLM"
    monkeypatch.setitem(MODEL_FAMILIES, architecture, MODEL_FAMILIES["LlamaForCausalLM"])
    only = (f"end_to_end/parity-{architecture}",)
    platform = faulty.CpuCopy(faulty.OneThread)
    with Subject(platform) as subject:
        (skipped,) = run_suite(subject, only).outcomes
    assert skipped.status is Status.SKIPPED
    assert f"no tiny config of {architecture} is known" in skipped.detail
    config = {**TINY_CONFIGS["LlamaForCausalLM"], "architectures": [architecture], "num_hidden_layers": 1}
    monkeypatch.setitem(TINY_CONFIGS, architecture, config)
    with Subject(platform) as subject:
        assert run_suite(subject, only).passed
    rotten = faulty.CpuCopy(faulty.LeakyDevice)
    with Subject(rotten) as subject:
        assert not run_suite(subject, only).passed


def test_a_config_is_known_for_every_model_that_cardan_brings() -> None:
    assert set(MODEL_FAMILIES) == set(TINY_CONFIGS) | set(WRAPPERS)
