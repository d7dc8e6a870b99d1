"""Faults that are planted into a platform: each is called different, and attribution names what carries it.

In float32, so that rounding does not hide them; models are tiny, kernels those of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import planted_faults as faults
import pytest
import quantized_checkpoints
import tiny_models
from accuracy_tiny import tiny_cases, tiny_config

from cardan.accuracy.attribution import attribute
from cardan.accuracy.attribution_report import Attribution
from cardan.accuracy.cases import Case
from cardan.accuracy.comparison import Comparison, compare
from cardan.accuracy.golden import Golden
from cardan.accuracy.recording import Wanted, record
from cardan.accuracy.verdict import Verdict
from cardan.runner import NeutralDevice

VOCAB = quantized_checkpoints.VOCAB
"""The smallest of all models' vocabularies."""


@dataclass(frozen=True)
class Fault:
    """A fault and what must be said of it.

    Attributes:
        device: that has it.
        feature: that carries it.
        layer: where it begins; None where there is none.
        model: that shows it.
        semantics: whether only draws show it.
        shared: whether sequences with cached prefixes are among those that run.
    """

    device: type[NeutralDevice]
    feature: str
    layer: int | None = None
    model: str = "llama"
    semantics: bool = False
    shared: bool = True


FAULTS = {
    "rotation's base off by a percent": Fault(faults.WrongRope, "rotation", 0),
    "one norm's epsilon": Fault(faults.WrongEpsilon, "norms", 1),
    "keys of two heads swapped": Fault(faults.SwappedHeads, "attention", 1),
    "window off by one": Fault(faults.WideWindow, "attention", 1, model="mistral-window"),
    "one block's scale": Fault(faults.WrongBlock, "quantized linears", 1, model="gptq4-32-sym"),
    "top-p ignored": Fault(faults.NoTopP, "top_p", semantics=True),
    "penalty ignored": Fault(faults.NoPenalties, "frequency_penalty", semantics=True),
    "keys and values a slot late": Fault(faults.LateSlots, "chunked prefill", 0, shared=False),
    "bucket padded in front": Fault(faults.WrongBucket, "graphs"),
    "scales of float8 doubled": Fault(faults.DoubledFloat8, "quantized linears", 0, model="fp8-blocks"),
}
QUICK = ("one norm's epsilon", "top-p ignored", "keys and values a slot late")


def sequences(shared: bool) -> tuple[Case, ...]:
    cases = tiny_cases() if shared else tiny_cases()[:5]
    return tuple(replace(case, ids=tuple(token % VOCAB for token in case.ids)) for case in cases)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of tiny models by name, each made once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("model")
            if name in quantized_checkpoints.METHODS:
                quantized_checkpoints.write(folder, quantized_checkpoints.METHODS[name])
            else:
                family, _, variant = name.partition("-")
                tiny_models.make_tiny(family, folder, variant or None)
            made[name] = folder
        return made[name]

    return make


@pytest.fixture(scope="module")
def truths(models: Callable[[str], Path]) -> Callable[[str, bool], Golden]:
    """Records of the platform without faults, each made once."""
    made: dict[tuple[str, bool], Golden] = {}

    def make(model: str, shared: bool) -> Golden:
        if (model, shared) not in made:
            wanted = Wanted(cases=sequences(shared), semantics=False)
            made[model, shared] = record(tiny_config(models(model), "cpu", chunk=faults.CHUNK), wanted)
        return made[model, shared]

    return make


def found(fault: Fault, truth: Golden, model: Path) -> tuple[Comparison, Attribution]:
    config = tiny_config(model, "cpu", chunk=faults.CHUNK)
    platform = faults.planted(fault.device)
    wanted = Wanted(cases=sequences(fault.shared), noise=False, semantics=fault.semantics)
    compared = compare(truth, record(config, wanted, platform=platform))
    return compared, attribute(truth, compared, config, platform=platform)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAULTS]
)
def test_a_planted_fault_is_found_and_named(
    name: str, truths: Callable[[str, bool], Golden], models: Callable[[str], Path]
) -> None:
    fault = FAULTS[name]
    if fault.feature == "graphs":
        pytest.importorskip("cardan_native", reason="only the native kernels capture steps on the CPU")
    truth = truths(fault.model, fault.shared)
    compared, attribution = found(fault, truth, models(fault.model))
    assert compared.judgement.verdict is Verdict.DIFFERENT, compared.judgement
    assert attribution.feature == fault.feature, attribution.statements
    assert attribution.layer == fault.layer, attribution.statements
    if fault.semantics:
        assert fault.feature in compared.judgement.reasons[0]
        assert compared.all_positions.largest < 1e-12


@pytest.mark.slow
def test_of_two_faults_none_is_blamed_alone(models: Callable[[str], Path]) -> None:
    """Steps that are wrong when captured and prefixes that are wrong when cached: only all features off mend both."""
    pytest.importorskip("cardan_native", reason="only the native kernels capture steps on the CPU")
    config, cases = tiny_config(models("llama"), "cpu", chunk=-1), sequences(shared=True)
    wanted = Wanted(cases=cases, semantics=False)
    truth = record(config, wanted)
    platform = faults.planted(faults.TwoFaults)
    compared = compare(truth, record(config, replace(wanted, noise=False), platform=platform))
    attribution = attribute(truth, compared, config, platform=platform)
    tried = {trial.feature: trial for trial in attribution.trials}
    assert {"graphs", "prefix cache", "batching"} < set(tried)
    assert [name for name, trial in tried.items() if trial.gone] == ["all of these"], attribution.trials
    assert "fused kernels" not in tried


@pytest.mark.slow
def test_operations_that_cannot_be_held_to_references_leave_the_features(
    models: Callable[[str], Path], truths: Callable[[str, bool], Golden], monkeypatch: pytest.MonkeyPatch
) -> None:
    def checker(*_: object) -> None:
        raise MemoryError("no room for references")

    monkeypatch.setattr("cardan.accuracy.attribution.Checker", checker)
    _, attribution = found(FAULTS["keys and values a slot late"], truths("llama", False), models("llama"))
    assert attribution.feature == "chunked prefill"
    assert attribution.deviations == ()
    (untried,) = [trial for trial in attribution.trials if trial.note]
    assert (untried.feature, untried.note) == ("operations", "could not be tried: MemoryError: no room for references")


def test_a_trial_without_room_leaves_the_others(
    models: Callable[[str], Path], truths: Callable[[str, bool], Golden], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a device shows nothing of its models: all features off together are tried there as well."""
    monkeypatch.setattr("cardan.accuracy.attribution.watch", lambda *_: None)
    config = tiny_config(models("llama"), "cpu", "bfloat16", chunk=faults.CHUNK)
    platform = faults.planted(faults.NoRoom)
    wanted = Wanted(cases=sequences(shared=True), noise=False, semantics=False, layers=False)
    truth = truths("llama", True)
    compared = compare(truth, record(config, wanted, platform=platform))
    judgement = replace(compared.judgement, verdict=Verdict.DIFFERENT)
    attribution = attribute(truth, replace(compared, judgement=judgement), config, platform=platform)
    notes = {trial.feature: trial.note for trial in attribution.trials if trial.note}
    slots = faults.NoRoom.opened.slots
    assert len(slots) == 2
    assert slots[1] < slots[0] / 4, "a trial's pool holds the sequences and no more"
    assert notes == {
        "keys and values in bfloat16": f"could not be tried: RuntimeError: no room for a pool of {slots[1]} slots",
        "activations in bfloat16": "could not be tried: MemoryError: no room for model 2",
    }
    tried = {trial.feature for trial in attribution.trials if not trial.note}
    assert {"prefix cache", "chunked prefill", "batching", "all of these"} <= tried


def test_without_a_fault_there_is_nothing_to_attribute(
    truths: Callable[[str, bool], Golden], models: Callable[[str], Path]
) -> None:
    compared, attribution = found(Fault(NeutralDevice, ""), truths("llama", True), models("llama"))
    assert compared.judgement.verdict is Verdict.SAME
    assert attribution.feature == ""
    assert attribution.statements == ("There is no difference beyond noise, so nothing was looked for.",)


@pytest.mark.slow
def test_a_kernel_that_cannot_be_watched_is_named(
    truths: Callable[[str, bool], Golden], models: Callable[[str], Path]
) -> None:
    """Rotation and attention in one kernel: apart they are right, and every operation that is watched is."""
    compared, attribution = found(Fault(faults.WrongFusion, ""), truths("llama", True), models("llama"))
    assert compared.judgement.verdict is Verdict.DIFFERENT
    assert attribution.feature == "fused kernels"
    assert attribution.deviations == ()
    assert attribution.layer is None


@pytest.mark.slow
def test_other_weights_are_no_features(
    truths: Callable[[str, bool], Golden], models: Callable[[str], Path], tmp_path: Path
) -> None:
    """A fault that no reference mends, since it is the model's own: nothing is blamed, and where it begins is said."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(models("llama") / "model.safetensors")
    name = "model.layers.1.post_attention_layernorm.weight"
    tensors[name] = tensors[name] * np.float32(1.01)
    (tmp_path / "config.json").write_bytes((models("llama") / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    compared, attribution = found(Fault(NeutralDevice, ""), truths("llama", True), tmp_path)
    assert compared.judgement.verdict is Verdict.DIFFERENT
    assert attribution.feature == ""
    assert "fused kernels" not in {trial.feature for trial in attribution.trials}, "the CPU's rotate apart"
    assert attribution.statements[0].startswith("Nothing that runs here carries the difference")
    assert "operations is as near to its float64 reference as float32 rounds" in attribution.statements[1]
    assert attribution.tap is not None
    assert attribution.tap.name == "layers.1.mlp_norm"
    assert attribution.layer == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_twenty_repeats_raise_no_alarm(dtype: str, models: Callable[[str], Path]) -> None:
    """The same platform with other batches and chunks."""
    cases = sequences(shared=True)
    config = tiny_config(models("llama"), "cpu", dtype)
    truth = record(config, Wanted(cases=cases, semantics=False))
    rng = np.random.default_rng(11)
    for repeat in range(10):
        chunk = int(rng.choice([4, 8, 12, 24, 40, -1]))
        scheduler = replace(config.scheduler, chunked_prefill_size=chunk, max_running_requests=int(rng.integers(1, 20)))
        wanted = Wanted(cases=cases, noise=False, semantics=False)
        compared = compare(truth, record(replace(config, scheduler=scheduler), wanted))
        assert compared.judgement.verdict is Verdict.SAME, (repeat, scheduler, compared.judgement)
