"""The CPU platform's tuner: what it finds from times, what it measures, and that a table reaches the linears."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

cn = pytest.importorskip("cardan_native")

from cardan.platform import DeviceInfo, LinearSpec, Tunable, TunedLinear  # noqa: E402
from cardan.platform.tuned_tables import TuningTable, write_table  # noqa: E402
from cardan.testing.conformance import Subject  # noqa: E402
from cardan.testing.conformance.engine_run import Ask, EngineRun, Layout, greedy, prompts, tiny  # noqa: E402
from cardan_cpu import native_tuning, platform  # noqa: E402
from cardan_cpu.kernels import choose  # noqa: E402
from cardan_cpu.native_crossovers import CACHE, FOR_MANY, REGISTERS, default_crossovers  # noqa: E402
from cardan_cpu.native_tuning import Job, NativeTuner, best_crossovers, fastest, time_kernels  # noqa: E402

ROWS = (1, 2, 3, 4, 6, 8, 16, 32, 512)
INFO = DeviceInfo(index=0, name="Some CPU")
NATIVE = {"kernels": "native", "threads": 2, "activations": "int16"}
FEW = Tunable(name="x.few", default=64, least=0, most=64, help="few")
MANY = Tunable(name="x.many", default=2, least=1, most=1024, help="many")


def times(registers: float, cache: tuple[float, float], many: tuple[float, float]) -> dict[str, dict[int, float]]:
    """Seconds: so much for each row in registers; for the others a part of its own and so much for each row."""
    return {
        REGISTERS: {rows: registers * rows for rows in ROWS if rows <= FEW.most},
        CACHE: {rows: cache[0] + cache[1] * rows for rows in ROWS},
        FOR_MANY: {rows: many[0] + many[1] * rows for rows in ROWS},
    }


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (times(1.0, (1.6, 0.5), (99.0, 0.1)), {"few": 3, "many": 512}),  # the third only pays for a long prompt
        (times(1.0, (1.6, 0.5), (9.0, 0.1)), {"few": 3, "many": 32}),
        (times(1.0, (1.6, 0.5), (4.2, 0.1)), {"few": 3, "many": 8}),
        (times(1.0, (1.6, 0.5), (0.5, 0.1)), {"few": 0, "many": 1}),
        (times(0.1, (1.6, 0.5), (9.0, 9.0)), {"few": 32, "many": 1024}),  # the third never pays
        (times(9.0, (1.6, 0.5), (99.0, 9.0)), {"few": 0, "many": 1024}),
    ],
)
def test_each_kernel_gets_the_rows_that_it_is_fastest_for(
    measured: Mapping[str, Mapping[int, float]], expected: dict[str, int]
) -> None:
    assert best_crossovers(measured, {"few": FEW, "many": MANY}) == expected


def test_one_number_alone_is_found() -> None:
    both = times(1.0, (1.6, 0.5), (4.2, 0.1))
    assert best_crossovers({key: both[key] for key in (REGISTERS, CACHE)}, {"few": FEW}) == {"few": 3}
    assert best_crossovers({key: both[key] for key in (CACHE, FOR_MANY)}, {"many": MANY}) == {"many": 8}


def test_defaults_are_kept_where_they_are_as_good() -> None:
    same = {kernel: dict.fromkeys(ROWS, 1.0) for kernel in (REGISTERS, CACHE, FOR_MANY)}
    same[CACHE][4] = 0.99
    assert best_crossovers(same, {"few": FEW, "many": MANY}) == {"few": 64, "many": 2}
    same[CACHE][4] = 0.5
    assert best_crossovers(same, {"few": FEW, "many": MANY}) != {"few": 64, "many": 2}


def test_no_kernel_gets_more_rows_than_it_takes() -> None:
    few = Tunable(name="x.few", default=1, least=0, most=4, help="few")
    measured = times(0.1, (99.0, 1.0), (99.0, 9.0))
    measured[REGISTERS] = {rows: seconds for rows, seconds in measured[REGISTERS].items() if rows <= few.most}
    assert best_crossovers(measured, {"few": few, "many": MANY}) == {"few": 4, "many": 1024}


def test_the_fastest_call_counts_and_the_first_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 5.0, 7.0, 7.0, 10.0])
    monkeypatch.setattr("cardan_cpu.native_tuning.time.perf_counter", lambda: next(clock))
    calls = []
    assert fastest(lambda: calls.append(1), 3) == 2.0
    assert len(calls) == 4


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements that take no time, and say little."""
    monkeypatch.setattr(native_tuning, "SIZES", (32, 256))
    monkeypatch.setattr(native_tuning, "ROUNDS", 1)
    monkeypatch.setattr(native_tuning, "PROMPT_ROUNDS", 1)
    monkeypatch.setattr(native_tuning, "ROWS", (1, 2, 8))
    monkeypatch.setattr(native_tuning, "PROMPT_ROWS", (80,))


@pytest.mark.parametrize("variant", cn.available())
def test_everything_is_measured_where_no_model_is_given(small: None, variant: str) -> None:
    native = cn.load(variant)
    before = native.threads()
    tuner = NativeTuner("Some CPU", variant, 1)
    told: list[tuple[str, int, int]] = []
    found = tuner.measure((), lambda *now: told.append(now))
    tunables = {tunable.name: tunable for tunable in tuner.tunables()}
    assert found.keys() == tunables.keys() == default_crossovers(variant).keys()
    assert all(tunables[name].least <= value <= tunables[name].most for name, value in found.items())
    assert told[0][1] == 0
    assert told[-1][1] == told[-1][2] > 0
    assert native.threads() == before


def test_a_kernel_is_measured_for_the_rows_that_it_can_take(small: None) -> None:
    variant = cn.available()[-1]
    tunables = {it.name: it for it in NativeTuner("Some CPU", variant, 1).tunables()}
    asked = {part: tunables[f"byte-int16.{part}"] for part in ("few", "many") if f"byte-int16.{part}" in tunables}
    linear = TunedLinear("Q8_0", LinearSpec(name="w", out_features=32, in_features=256, dtype="float32"))
    measured = time_kernels(cn.load(variant), Job("byte-int16", tuple(asked), "int16", (linear,)), asked)
    assert set(measured[REGISTERS]) == {1, 2, 8}
    others = [set(rows) for kernel, rows in measured.items() if kernel != REGISTERS]
    assert all(rows == ({1, 2, 8, 80} if "many" in asked else {1, 2, 8}) for rows in others)


def test_of_a_model_only_what_it_needs_is_measured(small: None) -> None:
    variant = cn.available()[-1]
    linears = [
        TunedLinear(fmt, LinearSpec(name=str(index), out_features=32, in_features=256, dtype=dtype))
        for index, (fmt, dtype) in enumerate(
            [
                ("Q4_1", "bfloat16"),
                ("Q4_1", "bfloat16"),
                ("Q6_K", "float32"),
                ("I32", "float32"),
                ("F8_E4M3", "float32"),
            ]
        )
    ]
    found = NativeTuner("Some CPU", variant, 1).measure(linears, lambda *_: None)
    assert {name.partition(".")[0] for name in found} == {"nibble-int16", "six-float"}
    asked = NativeTuner("Some CPU", variant, 1, "int8").measure(linears[:1], lambda *_: None)
    assert {name.partition(".")[0] for name in asked} == {"nibble-int8"}
    assert NativeTuner("Some CPU", variant, 1).measure(linears[3:], lambda *_: None) == {}


def test_the_work_of_a_model_is_in_its_largest_and_most_frequent_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(name: str, out: int) -> TunedLinear:
        return TunedLinear("Q4_1", LinearSpec(name=name, out_features=out, in_features=64, dtype="float32"))

    linears = [linear("head", 50_000), *(linear(f"{i}.a", 100) for i in range(30)), linear("b", 99), linear("c", 98)]
    sizes = [it.spec.out_features for it in native_tuning._most_work(linears)]
    assert sizes == [native_tuning.MOST_FEATURES, 100, 99]


def test_measurements_hold_for_processor_variant_threads_and_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = platform.configured(NATIVE).tuner(INFO)
    assert tuner is not None
    variant = cn.chosen()
    assert tuner.processor == f"Some CPU ({variant}, 2 threads)"
    assert NativeTuner("Some CPU", variant, 1).processor == f"Some CPU ({variant}, 1 thread)"
    kernels = tuner.kernels
    assert re.fullmatch(rf"cardan-native {variant} [0-9a-f]{{12}}", kernels)
    module = tmp_path / "module.so"
    module.write_bytes(b"another build")
    monkeypatch.setattr(native_tuning, "find_spec", lambda name: type("Spec", (), {"origin": str(module)}))
    assert NativeTuner("Some CPU", variant, 2).kernels != kernels


@pytest.mark.skipif(choose("torch").kind is None, reason="needs torch")
def test_torch_has_nothing_to_tune() -> None:
    assert platform.configured({**NATIVE, "kernels": "torch"}).tuner(INFO) is None


def test_numbers_that_were_measured_reach_the_linears() -> None:
    device = platform.tuned({"nibble-float.few": 1}).open(INFO, {"threads": 1, "kernels": "native"})
    try:
        (linear,) = device.linear_methods()
        assert linear.crossovers == {**default_crossovers(cn.chosen()), "nibble-float.few": 1}
    finally:
        device.close()
    assert platform.crossovers == {}


def tokens(subject: Subject) -> tuple[Any, dict[str, list[int]]]:
    """How the plan says that the engine was tuned, and what it answers."""
    asked = {rid: Ask(ids=ids, **greedy(subject, 8)) for rid, ids in list(prompts().items())[:6]}
    with EngineRun(subject, tiny(subject), Layout(name="tuned", dtype="float32")) as run:
        answers = {rid: answer.tokens for rid, answer in run.ask(asked).items()}
        linear = run.prepared.device.device.linear_methods()[0]
        return (run.prepared.plan.settings["tuning"], dict(linear.crossovers)), answers


def test_a_start_takes_the_table_and_gives_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARDAN_CACHE", str(tmp_path))
    with Subject(platform, quick=True, options=("kernels=native", "threads=1")) as subject:
        (setting, crossovers), plain = tokens(subject)
        assert (setting.value, crossovers) == ("default", default_crossovers(cn.chosen()))
        tuner = subject.platform.tuner(subject.info)
        assert tuner is not None
        numbers = {it.name: it.most if it.default < it.most else it.least for it in tuner.tunables()}
        write_table(
            TuningTable(
                platform="cpu", processor=tuner.processor, kernels=tuner.kernels, date="2026-11-30", numbers=numbers
            ),
            tmp_path,
        )
        first, second = tokens(subject), tokens(subject)
        (setting, crossovers), tuned = first
        assert setting.why == f"tuned on 2026-11-30 for {tuner.processor}, {tuner.kernels}"
        assert crossovers == numbers
        assert first == second
        assert tuned == plain
