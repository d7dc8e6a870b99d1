"""The neutral runner on the CPU, held to transformers: however a sequence is cut and whoever shares the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from runner_harness import RunnerHarness, greedy

from cardan.platform import AttentionMeta, GraphRunner, MemoryRequest
from cardan.runner import StepSizes, largest_step, memory_formula, open_device
from cardan.runner.device import NeutralDevice
from cardan.runner.logprobs import BLOCK_BYTES, block_rows
from cardan.testing.null_platform import platform as null_platform
from cardan.types import ForwardMode, PromptLogprobs
from cardan_cpu import platform

TOLERANCE = 2e-4
VOCAB = tiny_models.VOCAB
RNG = np.random.default_rng(1)
IDS = RNG.integers(3, VOCAB, 50).tolist()
OTHER = RNG.integers(3, VOCAB, 23).tolist()


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_tiny(request.param, tmp_path_factory.mktemp("tiny") / request.param)


@pytest.fixture(scope="module")
def wanted(folder: Path) -> np.ndarray:
    return tiny_models.transformers_logits(folder, IDS)


@pytest.fixture
def harness(folder: Path) -> Iterator[RunnerHarness]:
    made = RunnerHarness(folder, platform)
    yield made
    made.runner.close()
    made.device.close()


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float((np.abs(got - want).max(-1) / np.abs(want).max(-1)).max())


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


@pytest.mark.parametrize("cuts", [(50,), (1, 49), (7, 7, 7, 29), (16, 16, 16, 2), (1,) * 50])
def test_logits_are_those_of_transformers_however_the_prompt_is_cut(
    harness: RunnerHarness, wanted: np.ndarray, cuts: tuple[int, ...]
) -> None:
    got, first = [], 0
    for cut in cuts:
        got.append(harness.logits((3, IDS[first : first + cut])))
        first += cut
    assert error(np.concatenate(got), wanted) <= TOLERANCE


def test_batch_mates_and_shared_prefixes_change_nothing(harness: RunnerHarness, wanted: np.ndarray) -> None:
    harness.logits((1, OTHER), (2, IDS[:30]))
    harness.share(5, 2, 20)
    mixed = harness.logits((1, [7]), (5, IDS[20:45]), (4, OTHER[:3]), (2, [IDS[30]]))
    assert error(mixed[1:26], wanted[20:45]) <= TOLERANCE
    assert error(mixed[-1:], wanted[30:31]) <= TOLERANCE
    decoded = harness.logits((1, [9]), (5, [IDS[45]]), (2, [IDS[31]]))
    assert error(decoded[1:], wanted[[45, 31]]) <= TOLERANCE


def test_greedy_tokens_come_back_through_the_device(harness: RunnerHarness, folder: Path) -> None:
    tokens = harness.generate(3, IDS[:20], 12)
    logits = tiny_models.transformers_logits(folder, IDS[:20] + tokens)
    assert tokens == logits[19:-1].argmax(-1).tolist()


def test_known_and_unknown_tokens_mix_in_one_step(harness: RunnerHarness, folder: Path) -> None:
    first = harness.step((1, IDS[:10]), (2, OTHER[:4])).tokens
    result = harness.step((2, [-1]), (6, IDS[:5]), (1, [-1]), mode=ForwardMode.MIXED)
    for token, ids in zip(result.tokens, ([*OTHER[:4], first[1]], IDS[:5], [*IDS[:10], first[0]]), strict=True):
        assert token == tiny_models.transformers_logits(folder, [int(i) for i in ids])[-1].argmax()


def test_a_step_can_be_read_twice_and_sampled_late(harness: RunnerHarness) -> None:
    batch = harness.batch([(1, IDS[:9])])
    step = harness.runner.launch(batch)
    forbidden = int(harness.generate(2, IDS[:9], 1)[0])
    late = greedy(
        batch.row_ids,
        batch.seq_lens,
        VOCAB,
        bias_index=np.zeros(1, np.int32),
        bias_ids=np.array([forbidden], np.int32),
        bias_values=np.array([-np.inf], np.float32),
    )
    step.sample(late)
    assert step.result() is step.result()
    assert step.result().tokens[0] != forbidden


def test_a_step_without_samples_gives_an_empty_result(harness: RunnerHarness) -> None:
    batch = harness.batch([(1, IDS[:9])])
    step = harness.runner.launch(replace(batch, logits_at=np.zeros(0, np.int32), sampling=None))
    step.sample()
    assert len(step.result().tokens) == len(step.result().failed) == 0


def test_steps_say_whether_they_were_replayed(harness: RunnerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = harness.generate(1, IDS[:9], 4)

    class Replaying(GraphRunner):
        def __init__(self, _pool: Any, backend: Any, step: Any) -> None:
            self._backend, self._step = backend, step

        def can_replay(self, meta: AttentionMeta) -> bool:
            return len(meta.row_ids) == 1

        def replay(self, input_ids: Any, meta: AttentionMeta) -> Any:
            positions = harness.device.device.ops.from_host(meta.positions)
            return self._step(input_ids, positions, self._backend.plan(meta))

    monkeypatch.setattr(harness.device.device, "graph_runner", Replaying)
    harness.runner.capture_decode()
    assert harness.generate(2, IDS[:9], 4) == eager
    replayed = [
        harness.runner.launch(harness.batch(parts)).replayed
        for parts in ([(3, IDS[:9])], [(3, [5])], [(3, [6]), (1, [7])])
    ]
    assert replayed == [False, True, False]


@pytest.mark.parametrize(("ahead", "tried"), [(True, [1, 2, 4]), (False, [1, 4])])
def test_buckets_are_tried_before_the_first_request_where_capturing_them_takes_long(
    harness: RunnerHarness, monkeypatch: pytest.MonkeyPatch, ahead: bool, tried: list[int]
) -> None:
    found = []

    class Captured(GraphRunner):
        captures_ahead = ahead

        def __init__(self, _pool: Any, _backend: Any, _step: Any) -> None:
            pass

        def can_replay(self, meta: AttentionMeta) -> bool:
            found.append(len(meta.row_ids))
            return False

        def replay(self, input_ids: Any, meta: AttentionMeta) -> Any:
            raise AssertionError("can_replay said no")

    monkeypatch.setattr(harness.device.device, "graph_runner", Captured)
    harness.runner.capture_decode()
    harness.runner.warm_up((1, 2, 4))
    assert found == tried


def test_logprobs_are_of_the_models_own_logits(harness: RunnerHarness, wanted: np.ndarray) -> None:
    result = harness.step(
        (1, IDS[:30]),
        (2, IDS[:20]),
        want_logprobs=np.array([True, False]),
        top_logprobs=np.array([3, 0], np.int32),
        logprob_token_ids=((5, 90), ()),
        temperature=np.array([2.0, 0.0], np.float32),
        bias_index=np.zeros(1, np.int32),
        bias_ids=np.array([60], np.int32),
        bias_values=np.array([100.0], np.float32),
    )
    assert result.tokens[0] == 60
    entry, nothing = result.logprobs
    assert nothing is None
    assert entry is not None
    want = log_softmax(wanted[29])
    assert entry.logprob == pytest.approx(want[60], abs=1e-3)
    assert [i for i, _ in entry.top] == np.argsort(-want)[:3].tolist()
    assert [value for _, value in entry.top] == pytest.approx(np.sort(want)[::-1][:3], abs=1e-3)
    assert entry.chosen == ((5, pytest.approx(want[5], abs=1e-3)), (90, pytest.approx(want[90], abs=1e-3)))


@pytest.mark.parametrize("block", [None, 3])
def test_prompt_logprobs_are_log_softmax_of_transformers_logits(
    harness: RunnerHarness, wanted: np.ndarray, block: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if block:
        monkeypatch.setattr("cardan.runner.runner.block_rows", lambda _: block)
    asked = PromptLogprobs(
        token_index=np.arange(5, 49, dtype=np.int32),
        targets=np.array(IDS[6:], np.int32),
        top=np.array([2, 0] * 22, np.int32),
        token_ids=((), (4,)) * 22,
    )
    entries = harness.step((1, IDS), prompt=asked).prompt_logprobs
    want = log_softmax(wanted)
    assert [e.logprob for e in entries] == pytest.approx([want[i, IDS[i + 1]] for i in range(5, 49)], abs=2e-3)
    for offset, entry in enumerate(entries):
        position = offset + 5
        assert len(entry.top) == (2 if offset % 2 == 0 else 0)
        assert [i for i, _ in entry.top] == np.argsort(-want[position])[: len(entry.top)].tolist()
        assert [i for i, _ in entry.chosen] == ([4] if offset % 2 else [])


def test_blocks_of_prompt_logits_stay_within_their_bound() -> None:
    assert block_rows(49_152) * 49_152 * 4 <= BLOCK_BYTES
    assert block_rows(10**9) == 1


def test_warming_up_leaves_rows_alone(harness: RunnerHarness, wanted: np.ndarray) -> None:
    harness.logits((1, IDS[:20]))
    harness.runner.warm_up([1, 4])
    assert error(harness.logits((1, IDS[20:])), wanted[20:]) <= TOLERANCE


def test_a_row_of_nan_fails_alone(harness: RunnerHarness) -> None:
    harness.logits((1, IDS[:10]), (2, IDS[:10]))
    values = harness.pool.pool.values[0]
    memory = values.bits() if hasattr(values, "bits") else values
    memory[int(harness.slots[1][4])] = float("nan")
    result = harness.step((1, [5]), (2, [5]))
    assert result.failed.tolist() == [True, False]
    assert result.tokens[0] == 0
    assert harness.step((1, [-1]), (2, [-1])).failed.tolist() == [True, False]


def test_activations_are_bounded_by_a_formula_or_measured(
    harness: RunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = harness.model.facts
    sizes = largest_step(harness.plan)
    assert sizes.rows == harness.plan.max_running_requests
    assert harness.device.activation_bytes(harness.loaded, harness.plan) == memory_formula(facts, sizes)
    assert memory_formula(facts, StepSizes(sizes.tokens * 2, sizes.rows)) > memory_formula(facts, sizes)

    def measure(run) -> int:
        run()
        return 12345

    monkeypatch.setattr(harness.device.device, "activation_peak", measure)
    # the dry run samples few rows, decode steps all that run: three arrays of logits in float32
    logits = 3 * 4 * facts.vocab_size * sizes.rows
    assert harness.device.activation_bytes(harness.loaded, harness.plan) == 12345 + logits


def test_the_device_passes_on_memory_and_its_policy(harness: RunnerHarness) -> None:
    memory = harness.device.memory()
    request = MemoryRequest(
        memory=memory, weight_bytes=0, activation_bytes=0, graph_bytes=0, bytes_per_slot=8, page_size=1,
        min_slots=8, useful_slots=100,
    )  # fmt: skip
    assert harness.device.plan_memory(request).num_slots == 100
    assert isinstance(harness.device.under_pressure(), bool)
    assert harness.pool.num_bytes == harness.pool.pool.num_bytes
    assert harness.loaded.weight_bytes >= 4 * harness.model.facts.num_parameters


def test_models_and_pools_of_other_devices_are_refused(harness: RunnerHarness) -> None:
    with pytest.raises(TypeError, match="the model must come from this device's load, got int"):
        harness.device.activation_bytes(3, harness.plan)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the pool must come from this device's allocate_kv, got int"):
        harness.device.runner(harness.loaded, 3, harness.plan)  # type: ignore[arg-type]


def test_a_device_that_does_all_itself_is_passed_through() -> None:
    opened = open_device(
        null_platform, null_platform.devices()[0], {o.name: o.default for o in null_platform.options()}
    )
    assert not isinstance(opened, NeutralDevice)


@pytest.mark.slow
@pytest.mark.model
def test_smollm2_is_that_of_transformers(smollm2_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    ).eval()
    ids = np.random.default_rng(3).integers(20, 49_000, 200).tolist()
    with torch.no_grad():
        want = oracle(torch.tensor([ids])).logits[0].numpy()
    harness = RunnerHarness(smollm2_path, platform)
    got = np.concatenate([harness.logits((1, ids[a:b])) for a, b in ((0, 67), (67, 68), (68, 131), (131, 200))])
    assert error(got, want) <= TOLERANCE
    harness.share(2, 1, 150)
    assert error(harness.logits((2, ids[150:]), (3, ids[:40])), np.concatenate((want[150:], want[:40]))) <= TOLERANCE
    prompt = ids[:40]
    tokens = harness.generate(4, prompt, 16)
    with torch.no_grad():
        logits = oracle(torch.tensor([prompt + tokens])).logits[0].numpy()[39:-1]
    margins = np.sort(logits, -1)[:, -1] - np.take_along_axis(logits, np.array(tokens)[:, None], -1)[:, 0]
    assert margins.max() < 1e-3


@pytest.mark.model
def test_smollm2_in_bfloat16_stays_near_float32(smollm2_path: Path) -> None:
    ids = np.random.default_rng(4).integers(20, 49_000, 64).tolist()
    exact = RunnerHarness(smollm2_path, platform).logits((1, ids))
    harness = RunnerHarness(smollm2_path, platform, dtype="bfloat16")
    narrow = np.concatenate((harness.logits((1, ids[:40])), *(harness.logits((1, [i])) for i in ids[40:])))
    assert error(narrow, exact) < 0.1
    assert np.sqrt(np.mean((narrow - exact) ** 2) / np.mean(exact**2)) < 0.03
