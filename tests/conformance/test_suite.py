"""The suite's own mechanics: what is collected, how outcomes and reports look, and how it is run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faulty_platforms as faulty
import pytest

from cardan.cli.app import run
from cardan.errors import ConfigError
from cardan.models import MODEL_FAMILIES, build_model
from cardan.platform import Availability, Capabilities, DeviceInfo
from cardan.runner import NeutralDevice
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
from cardan.testing.conformance.engine_run import Ask, EngineRun, Layout, greedy, tiny
from cardan.testing.conformance.logit_bench import LogitBench
from cardan.testing.conformance.refusal_checks import ADVICE
from cardan.testing.conformance.tiny_checkpoint import TinyCheckpoint
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
            subject, ("memory", "ops", "linear", "kv", "sampler", "end_to_end/without-cache", "end_to_end/cold")
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


class BrokenPlatform(faulty.CpuCopy):
    """Its device does not open."""

    def __init__(self) -> None:
        super().__init__(faulty.OneThread)

    def open(self, device: DeviceInfo, options: Mapping[str, Any]) -> Any:
        raise RuntimeError("the cable is out")


def test_a_device_that_does_not_open_still_has_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cardan.cli.conforming.choose_platform", lambda name, **_: BrokenPlatform())
    file = tmp_path / "report.json"
    assert run(["conform", "--only", "capabilities/options", "--only", "ops/silu", "--json", str(file)]) == 1
    report = json.loads(file.read_text())
    assert report["level"] is None
    assert {outcome["status"] for outcome in report["outcomes"]} == {"passed", "failed"}
    assert "the cable is out" in report["outcomes"][-1]["detail"]


class ClosedPlatform(faulty.CpuCopy):
    """Counts what is open, and cannot warm up three rows."""

    def __init__(self) -> None:
        self.open_devices = self.open_runners = 0

        class Fragile(faulty.ChangedRunner):
            def warm_up(inner, buckets: Sequence[int]) -> None:  # noqa: N805
                if 3 in buckets:
                    raise RuntimeError("three rows are too many")

            def close(inner) -> None:  # noqa: N805
                self.open_runners -= 1

        class Device(NeutralDevice):
            def runner(inner, *arguments: Any) -> Any:  # noqa: N805
                self.open_runners += 1
                return Fragile(super().runner(*arguments), lambda sampling: sampling)

            def close(inner) -> None:  # noqa: N805
                self.open_devices -= 1

        super().__init__(lambda info: Device(faulty.OneThread(info)))

    def open(self, device: DeviceInfo, options: Mapping[str, Any]) -> Any:
        self.open_devices += 1
        return super().open(device, options)


def test_nothing_stays_open_when_an_engine_does_not_start() -> None:
    platform = ClosedPlatform()
    with Subject(platform) as subject:
        with pytest.raises(RuntimeError, match="three rows"):
            EngineRun(subject, tiny(subject), Layout(name="fragile", warm_ups=1))
        assert (platform.open_devices, platform.open_runners) == (0, 0)
        with LogitBench(subject):
            assert platform.open_runners == 1
        assert platform.open_runners == 0
    assert platform.open_devices == 0


def test_a_table_comes_in_the_types_of_the_suite() -> None:
    """The CPU platform would recommend bfloat16 for weights that are not float32."""
    seen: list[Any] = []

    class Device(NeutralDevice):
        def load(self, model: Any, checkpoint: Any, plan: Any, progress: Any = None) -> Any:
            seen.append(plan)
            return super().load(model, checkpoint, plan, progress)

    class Narrow(faulty.CpuCopy):
        def capabilities(self, device: DeviceInfo) -> Capabilities:
            answers = super().capabilities(device)
            without = {key: value for key, value in answers.features.items() if "dtype:float32" not in str(key)}
            return replace(answers, features=without)

    with Subject(Narrow(lambda info: Device(faulty.OneThread(info)))) as subject, LogitBench(subject):
        assert subject.best_dtype == "bfloat16"
    assert [(plan.dtype, plan.kv_cache_dtype) for plan in seen] == [("bfloat16", "bfloat16")]


def test_a_model_that_lists_no_tensors_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = "SilentForCausalLM"
    facts = build_model(TINY_CONFIGS["LlamaForCausalLM"], "silent", None).facts
    silent = SimpleNamespace(facts=replace(facts, architecture=architecture))
    monkeypatch.setattr("cardan.testing.conformance.tiny_checkpoint.build_model", lambda *_: silent)
    with pytest.raises(NotApplicableError, match=f"{architecture} lists no tensors"):
        TinyCheckpoint(tmp_path / "silent", {})


def only_outcome(platform: Any, name: str) -> Any:
    with Subject(platform) as subject:
        (outcome,) = [run_check(subject, check) for check in collect(subject, (name,)) if check.id == name]
    return outcome


def test_a_type_that_the_references_do_not_know_is_named() -> None:
    fp8 = faulty.CpuCopy(faulty.OneThread, {"kv_dtype:float8_e4m3": faulty.NATIVE})
    outcome = only_outcome(fp8, "attention/torch/over-float8_e4m3-kv")
    assert outcome.status is Status.SKIPPED
    assert "do not know how float8_e4m3 rounds" in outcome.detail


def test_a_format_made_at_load_says_in_how_many_bits() -> None:
    silent = faulty.CpuCopy(faulty.OneThread, {"quantize:x4": faulty.NATIVE})
    outcome = only_outcome(silent, "linear/made-at-load-x4[float32]")
    assert outcome.status is Status.FAILED
    assert "say with Capability(requantized=...) in how many bits" in outcome.detail


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"api_range": (7, 9)}, "api_range is 7 to 9, but it was tried with PLATFORM_API 1"),
        (
            {"probe": lambda: Availability(1, "no chip", usable=False)},
            "where it has a device: no chip",
        ),
        ({"probe": lambda: Availability(1, " ")}, "gives no reason"),
    ],
)
def test_a_platform_that_could_not_be_chosen_is_noticed(changes: dict[str, Any], message: str) -> None:
    platform = faulty.CpuCopy(faulty.OneThread)
    for name, value in changes.items():
        setattr(platform, name, value)
    assert message in only_outcome(platform, "capabilities/probe-and-api-range-let-it-run").detail


@pytest.mark.parametrize(
    ("message", "advises"),
    [
        ("No GEMM takes Q9. Pass --dtype float32.", True),
        ("top_p is not supported: it decodes greedily. Drop it.", True),
        ("The request is running into a limit.", False),
        ("The platform will not run it, pass on.", False),
    ],
)
def test_advice_is_a_sentence_of_its_own(message: str, advises: bool) -> None:
    assert (ADVICE.search(message) is not None) is advises


def test_an_engine_that_does_not_run_as_laid_out_is_noticed(cpu: Subject) -> None:
    """The layout that is asked for afterwards is not the one that ran."""
    requests = {"r": Ask(ids=tuple(range(3, 40)), **greedy(cpu, 4))}
    with EngineRun(cpu, tiny(cpu), Layout(name="cold")) as engine:
        engine.ask(requests)
        answers = engine.ask({"again": requests["r"]})
        engine.check_layout(answers)
        for layout, message in (
            (Layout(name="x", radix=False), "tokens in a cache that is off"),
            (Layout(name="x", overlap=True), "at most 1 steps were in flight at once, expected 2"),
            (Layout(name="x", graph=True), "0 steps were replayed, expected some"),
            (Layout(name="x", mixed=True), "0 passes were mixed"),
            (Layout(name="x", page=16), "pages have 1 tokens, asked for 16"),
            (Layout(name="x", chunk=7), "a prefill pass had 37 tokens, chunks have 7 at most"),
        ):
            engine._layout = layout
            with pytest.raises(CheckError, match=message):
                engine.check_layout(answers)


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
    monkeypatch.setattr("cardan.cli.conforming.choose_platform", lambda name, **_: floor)
    assert run(["conform", "--only", "memory"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED memory/no-memory-is-an-error-not-a-floor: 0 bytes are free: a pool of 4096 slots" in printed
    assert "does not conform" in printed


def test_the_command_refuses_an_unknown_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["conform", "--platform", "null", "--only", "speed"]) == 2
    assert "must begin with one of" in capsys.readouterr().err


def pytest_of_the_suite(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio"]
    return subprocess.run(
        [*command, "--pyargs", "cardan.testing", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_pytest_runs_the_same_checks(tmp_path: Path) -> None:
    done = pytest_of_the_suite(tmp_path, "--platform", "null", "--conformance-only", "memory")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 passed" in done.stdout
    assert "1 skipped" in pytest_of_the_suite(tmp_path).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--platform", "null", "--conformance-only", "speed"), "--conformance-only must begin with one of"),
        (("--platform", "no-such-platform"), "no-such-platform"),
    ],
)
def test_a_wrong_option_of_pytest_is_a_usage_error(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = pytest_of_the_suite(tmp_path, *arguments)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert message in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


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
    assert set(MODEL_FAMILIES) == set(TINY_CONFIGS) | set(WRAPPERS), "add a config to TINY_CONFIGS for a new family"
