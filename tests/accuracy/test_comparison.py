"""Verdicts: no false alarm where only the way of running or the type differs, and none missed where a model does."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from accuracy_tiny import tiny_config

from cardan.accuracy.comparison import compare
from cardan.accuracy.fingerprints import Fingerprint, TensorPrint, compare_fingerprints
from cardan.accuracy.golden import read_golden
from cardan.accuracy.noise import worst
from cardan.accuracy.recording import Wanted, record
from cardan.accuracy.verdict import ASSUMED, Measured, Verdict, judge, noise_band
from cardan.errors import GoldenFileError


def test_a_record_is_the_same_as_itself(recorded) -> None:
    compared = compare(recorded(), recorded())
    assert compared.judgement.verdict is Verdict.SAME
    assert compared.all_positions.largest < 1e-12
    assert compared.agreement.value == 1.0
    assert compared.perplexities.difference.value == 0
    assert not compared.differences
    assert max(compared.layer_errors.values()) == 0


@pytest.mark.parametrize("chunk", [8, 48])
def test_other_chunks_are_no_alarm(recorded, chunk: int) -> None:
    compared = compare(recorded(), recorded(chunk=chunk, noise=False))
    assert compared.judgement.verdict is Verdict.SAME, compared.judgement
    assert compared.judgement.band_from.startswith("measured on one side only: ")


def test_another_platform_is_no_alarm(recorded) -> None:
    ours, theirs = recorded(), recorded("cpu")
    compared = compare(ours, theirs)
    assert compared.judgement.verdict is Verdict.SAME, compared.judgement
    assert 0 < compared.all_positions.mean.value < 1e-10
    assert 0 < max(compared.layer_errors.values()) < 1e-5
    assert any(difference.what == "platform" for difference in compared.differences)
    assert not any(difference.weighs for difference in compared.differences)


def test_a_narrower_type_is_judged_by_its_own_noise(recorded) -> None:
    narrow = recorded("mlx", "bfloat16")
    compared = compare(recorded(), narrow)
    assert compared.judgement.verdict is Verdict.SAME, compared.judgement
    assert compared.differences[0].describe() == "dtype: float32 against bfloat16"
    assert compared.all_positions.mean.value > 1e-5
    alone = compare(recorded(), replace(narrow, noise={}))
    assert alone.judgement.verdict is Verdict.DRIFT, alone.judgement
    assert any("float32 against bfloat16" in reason for reason in alone.judgement.reasons)


def test_rounding_is_the_larger_part_of_the_floor(recorded) -> None:
    noise = recorded().noise
    assert "run again" in noise
    assert noise["run again"]["mean"] == 0
    assert {"batch size 1", "batch size 16", "nothing cached", "no overlap", "chunks of 16", "whole prompts"} <= {
        *noise
    }
    rounding = [spread for name, spread in noise.items() if name.startswith("rounding of float32")]
    assert len(rounding) == 2
    assert all(1e-13 < spread["mean"] < 1e-10 for spread in rounding)
    assert worst(noise)["mean"] == max(spread["mean"] for spread in noise.values())


def test_other_weights_are_different(recorded, tiny_llama: Path, tmp_path: Path, cases) -> None:
    """One norm's weight is a hundredth larger: another checksum, and numbers far beyond the noise."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(tiny_llama / "model.safetensors")
    name = "model.layers.1.post_attention_layernorm.weight"
    tensors[name] = tensors[name] * np.float32(1.01)
    (tmp_path / "config.json").write_bytes((tiny_llama / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    other = record(tiny_config(tmp_path), Wanted(cases=cases, noise=False, semantics=False))
    compared = compare(recorded(), other)
    assert compared.judgement.verdict is Verdict.DIFFERENT
    assert compared.judgement.reasons[0] == f"1 tensors of the same format hold other values: {name}"
    assert any("times the noise floor" in reason for reason in compared.judgement.reasons)
    blind = replace(other, fingerprint=replace(other.fingerprint, weights={}))
    assert compare(recorded(), blind).judgement.verdict is Verdict.DIFFERENT
    errors = compared.layer_errors
    assert errors["layers.1.input_norm"] < 1e-6
    assert errors["layers.1.mlp_norm"] > 1e-3


@pytest.mark.parametrize("changes", [{"rope_theta": 10100.0}, {"rms_norm_eps": 1e-3}])
def test_a_small_fault_is_far_from_noise_in_float32(
    recorded, tiny_llama: Path, tmp_path: Path, cases, changes: dict[str, float]
) -> None:
    """The rotation's base off by a percent, or another epsilon, over the same weights."""
    config = json.loads((tiny_llama / "config.json").read_text())
    config.pop("rope_parameters", None)
    shutil.copy(tiny_llama / "model.safetensors", tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"rope_theta": 10000.0, **config, **changes}))
    faulty = record(tiny_config(tmp_path), Wanted(cases=cases, noise=False, semantics=False))
    compared = compare(recorded(), faulty)
    assert compared.judgement.verdict is Verdict.DIFFERENT, compared.judgement
    assert not any("hold other values" in reason for reason in compared.judgement.reasons)


def test_json_holds_everything(recorded) -> None:
    value = json.loads(json.dumps(compare(recorded(), recorded("cpu")).to_json(), allow_nan=False))
    assert value["judgement"]["verdict"] == "same within noise"
    assert len(value["cases"]) == 7
    assert value["by_margin"][-1]["high"] is None
    assert sum(entry["positions"] for entry in value["by_margin"]) == value["all_positions"]["positions"]


def test_records_of_other_sequences_are_refused(recorded) -> None:
    golden = recorded()
    first = golden.cases[0]
    other = replace(first, case=replace(first.case, ids=(5, 6)))
    with pytest.raises(GoldenFileError, match="Prompt 'of 2' has other token ids in the two records"):
        compare(golden, replace(golden, cases=(other, *golden.cases[1:])))
    with pytest.raises(GoldenFileError, match="The records are of 7 and 6 prompts, and 'of 2' is not among"):
        compare(golden, replace(golden, cases=golden.cases[1:]))


def test_fewer_tops_are_compared_as_far_as_they_go(recorded) -> None:
    golden = recorded()
    fewer = replace(golden, cases=tuple(replace(entry, scores=entry.scores.cut(8)) for entry in golden.cases))
    compared = compare(golden, fewer)
    assert compared.top == 8
    assert compared.all_positions.largest < 1e-9


# --- the rules alone ---

MAKER = Fingerprint(
    source="cardan", platform="p", device="d", model="m", architecture="A", vocab_size=9, dtype="float32"
)
FLOOR = {"mean": 1e-9, "p99": 1e-8, "max": 1e-7, "moves": 1e-3}
QUIET = Measured(kl_mean=1e-9, kl_p99=1e-8, kl_max=1e-7, where="here", perplexity_ratio=1.0)


def verdict_of(measured: Measured, a: Fingerprint = MAKER, b: Fingerprint = MAKER):
    return judge(measured, compare_fingerprints(a, b), (FLOOR, "measured"), (a, b))


@pytest.mark.parametrize(
    ("changes", "verdict", "reason"),
    [
        ({}, Verdict.SAME, "within 10 times the noise floor"),
        ({"kl_mean": 9e-9}, Verdict.SAME, "within 10 times"),
        ({"kl_mean": 5e-8}, Verdict.DRIFT, "mean KL 5e-08 is 50 times the noise floor 1e-09; 10 times are noise"),
        ({"kl_mean": 5e-7}, Verdict.DIFFERENT, "mean KL 5e-07 is 5e"),
        ({"kl_max": 1e-2}, Verdict.DIFFERENT, "max KL 0.01 at here is"),
        ({"flip": (5e-3, "token 3")}, Verdict.SAME, "within"),
        ({"flip": (0.5, "token 3")}, Verdict.DIFFERENT, "greedy text parts at token 3 although"),
    ],
)
def test_the_rules_where_nothing_explains_a_difference(changes, verdict: Verdict, reason: str) -> None:
    found = verdict_of(replace(QUIET, **changes))
    assert found.verdict is verdict
    assert reason in found.reasons[0]


@pytest.mark.parametrize(
    ("kl_mean", "verdict"), [(1e-9, Verdict.SAME), (2e-3, Verdict.DRIFT), (0.3, Verdict.DIFFERENT)]
)
def test_a_type_explains_small_differences(kl_mean: float, verdict: Verdict) -> None:
    assert verdict_of(replace(QUIET, kl_mean=kl_mean), b=replace(MAKER, dtype="bfloat16")).verdict is verdict


def weights(fmt: str, encoded: str, values: str = "") -> Fingerprint:
    return replace(MAKER, weights={"w": TensorPrint(fmt, (2, 2), encoded, values)})


def test_weights_settle_what_numbers_cannot() -> None:
    changed = verdict_of(QUIET, weights("Q4_0", "aa"), weights("Q4_0", "bb"))
    assert changed.verdict is Verdict.DIFFERENT
    assert changed.reasons[0] == "1 tensors of the same format hold other values: w"
    requantized = verdict_of(QUIET, weights("F32", "aa", "v1"), weights("Q8_0", "bb", "v2"))
    assert requantized.verdict is Verdict.DRIFT
    recoded = verdict_of(QUIET, weights("F32", "aa", "v1"), weights("BF16", "bb", "v1"))
    assert recoded.verdict is Verdict.SAME


@pytest.mark.parametrize("name", ["architecture", "tokenizer", "vocab_size"])
def test_another_identity_is_another_model(name: str) -> None:
    known = replace(MAKER, tokenizer="t")
    other = replace(known, **{name: 7 if name == "vocab_size" else "x"})
    found = verdict_of(QUIET, known, other)
    assert found.verdict is Verdict.DIFFERENT
    assert f"another model by its {name}" in found.reasons[0]


def test_missing_tensors_are_said() -> None:
    found = verdict_of(QUIET, weights("F32", "aa"), replace(MAKER, weights={"v": TensorPrint("F32", (2,), "cc")}))
    assert found.verdict is Verdict.DRIFT
    assert "the checkpoints have other tensors" in found.reasons[0]


def test_floors_that_nobody_measured_are_assumed_by_type() -> None:
    band, source = noise_band({}, {}, MAKER, replace(MAKER, dtype="bfloat16"))
    assert band == ASSUMED["bfloat16"]
    assert source == "not measured; assumed for float32 and bfloat16"


def test_a_file_made_elsewhere_is_compared(recorded, tmp_path: Path) -> None:
    """By an installation that has other platforms: nothing of the maker's has to be installed."""
    golden = recorded()
    elsewhere = replace(golden.fingerprint, platform="elsewhere", device="unknown", versions={"elsewhere": "9"})
    replace(golden, fingerprint=elsewhere).write(tmp_path / "x.cardan")
    compared = compare(read_golden(tmp_path / "x.cardan"), recorded("cpu"))
    assert compared.judgement.verdict is Verdict.SAME
