"""Where time goes: calls are counted and timed without what they call, steps are taken apart, bad sizes are refused."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

from cardan.bench.op_times import OpClock
from cardan.bench.profile import HOST_PARTS, profile
from cardan.cli.app import run
from cardan.config import EngineConfig
from cardan.errors import ConfigError

pytest.importorskip("cardan_cpu")


def settle(result: Any) -> None:
    """Nothing to wait for."""


def test_an_op_is_timed_without_the_ops_that_it_calls() -> None:
    clock = OpClock(on=True)

    def inner() -> None:
        time.sleep(0.03)

    timed_inner = clock.timed("inner", inner, settle)

    def outer() -> None:
        timed_inner()
        timed_inner()
        time.sleep(0.01)

    clock.timed("outer", outer, settle)()
    assert (clock.times["inner"].calls, clock.times["outer"].calls) == (2, 1)
    assert clock.times["inner"].seconds >= 0.06
    assert 0.01 <= clock.times["outer"].seconds < clock.times["inner"].seconds
    clock.on = False
    timed_inner()
    assert clock.times["inner"].calls == 2


def test_waiting_for_a_result_counts() -> None:
    clock = OpClock(on=True)
    clock.timed("lazy", lambda: 1, lambda result: time.sleep(0.02))()
    assert clock.times["lazy"].seconds >= 0.02


def config(path: Path) -> EngineConfig:
    made = EngineConfig()
    return dataclasses.replace(
        made,
        model=dataclasses.replace(made.model, model=str(path), context_length=256),
        platform=dataclasses.replace(made.platform, platform="cpu"),
        cache=dataclasses.replace(made.cache, max_total_tokens=1024),
    )


@pytest.mark.model
def test_a_step_is_taken_apart(smollm2_path: Path) -> None:
    found, about = profile(config(smollm2_path), prompt_len=24, rows=(1, 2), steps=2)
    assert about["platform"] == "cpu"
    assert [(one.kind, one.rows, one.tokens) for one in found] == [
        ("prefill", 1, 24), ("decode", 1, 1), ("decode", 2, 2),
    ]  # fmt: skip
    for one in found:
        ops = {op.name: op for op in one.ops}
        # Four projections in each of 30 layers, some of which add the residual.
        assert ops["linear"].calls + (ops["linear_add"].calls if "linear_add" in ops else 0) >= 120
        assert ops["attention"].calls == 30
        assert ops["linear"].gb_s is not None
        assert ops["attention"].gflop_s is None
        assert set(one.host) == set(HOST_PARTS)
        # All of a step is shown: ops and host together are the step.
        assert sum(op.us for op in one.ops) + sum(one.host.values()) == pytest.approx(one.step_us)
        assert sum(op.share for op in one.ops) < 1
    # A prompt of 24 tokens is 24 times the products of one token, without the head's.
    products = [ops.gflop_s * ops.us for one in found for ops in one.ops if ops.name == "linear" and ops.gflop_s]
    assert products[0] == pytest.approx(24 * products[1])


@pytest.mark.model
def test_the_command_writes_tables_and_json(smollm2_path: Path, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "profile.json"
    flags = ["--prompt-len", "8", "--rows", "1", "--steps", "1", "--max-total-tokens", "512", "--platform", "cpu"]
    assert run(["bench", "profile", "--model", str(smollm2_path), *flags, "--output-json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "prefill, 1 rows, 8 tokens" in shown
    assert "host: detokenize" in shown
    assert [one["kind"] for one in json.loads(file.read_text())["profiles"]] == ["prefill", "decode"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"prompt_len": 0}, "--prompt-len must be at least 1, got 0"),
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"rows": (1, 0)}, "--rows must be at least 1, got 0"),
    ],
)
def test_nothing_to_measure_is_refused(sizes: dict[str, Any], message: str) -> None:
    wanted: dict[str, Any] = {"prompt_len": 8, "rows": (1,), "steps": 1, **sizes}
    with pytest.raises(ConfigError, match=message):
        profile(EngineConfig(), **wanted)


@pytest.mark.model
def test_a_prompt_that_does_not_fit_is_refused(smollm2_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--prompt-len must be at most \d+.*got 256"):
        profile(config(smollm2_path), prompt_len=256, rows=(1,), steps=1)
