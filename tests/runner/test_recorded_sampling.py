"""Recorded head and sampling: the same tokens as the sampler's own, whoever comes and goes, and nothing left unread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cardan_native")

import tiny_models
from runner_harness import RunnerHarness, greedy

from cardan.runner import recorded_sampling
from cardan.runner.recorded_sampling import Kind
from cardan.types import StepResult
from cardan_cpu import platform

ROWS = (1, 2, 3, 4)
STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_tiny("llama", tmp_path_factory.mktemp("recorded") / "llama")


@pytest.fixture
def harness(folder: Path) -> Iterator[RunnerHarness]:
    made = RunnerHarness(folder, platform, options={"kernels": "native"})
    yield made
    made.runner.close()
    made.device.close()


def constant(value: float, dtype: Any = np.float32) -> Any:
    return lambda rows: np.full(len(rows), value, dtype)


KINDS: dict[str, tuple[Kind | None, dict[str, Any]]] = {
    "greedy": (Kind.GREEDY, {}),
    "plain": (Kind.PLAIN, {"temperature": constant(1.3)}),
    "top-p": (Kind.FILTERED, {"temperature": constant(0.7), "top_p": constant(0.5)}),
    "hot-top-p": (Kind.FILTERED, {"temperature": constant(9.0), "top_p": constant(0.97)}),
    "min-p": (Kind.FILTERED, {"temperature": constant(1.0), "min_p": constant(0.3)}),
    "top-k": (Kind.LIMITED, {"temperature": constant(1.0), "top_k": constant(5, np.int32)}),
    "wide-top-k": (Kind.LIMITED, {"temperature": constant(3.0), "top_k": constant(70, np.int32)}),
    "all": (
        Kind.LIMITED,
        {
            "temperature": constant(0.9),
            "top_k": constant(40, np.int32),
            "top_p": constant(0.9),
            "min_p": constant(0.01),
        },
    ),
    "some-top-k": (
        Kind.LIMITED,
        {
            "temperature": constant(1.0),
            "top_p": constant(0.6),
            "top_k": lambda rows: np.where(np.asarray(rows) % 2, 3, 2**30).astype(np.int32),
        },
    ),
    "penalty": (None, {"presence_penalty": constant(0.0), "repetition_penalty": constant(1.0)}),
    "mixed": (None, {"temperature": lambda rows: np.where(np.asarray(rows) % 2, 0.0, 1.0).astype(np.float32)}),
}


def prompts(rows: tuple[int, ...]) -> list[tuple[int, list[int]]]:
    rng = np.random.default_rng(9)
    ids = {row: rng.integers(0, 90, 5 + row).tolist() for row in range(1, 12)}
    return [(row, ids[row]) for row in rows]


def decode(harness: RunnerHarness, rows: tuple[int, ...], changes: dict[str, Any], steps: int = STEPS) -> np.ndarray:
    """Tokens ``[steps, rows]``; the fixed arrays are the same objects in each step, as a scheduler gives them."""
    fixed = {
        name: np.minimum(make(rows), harness.vocab) if name == "top_k" else make(rows) for name, make in changes.items()
    }
    harness.step(*prompts(rows), **fixed)
    return np.stack([harness.step(*[(row, [-1]) for row in rows], **fixed).tokens for _ in range(steps)])


def eager(harness: RunnerHarness, rows: tuple[int, ...], changes: dict[str, Any], steps: int = STEPS) -> np.ndarray:
    """The same with recordings switched off; the rows begin anew."""
    held, harness.runner._recorded = harness.runner._recorded, None
    harness.slots.clear()
    try:
        return decode(harness, rows, changes, steps)
    finally:
        harness.runner._recorded = held
        harness.slots.clear()


@pytest.mark.parametrize("rows", [(1,), ROWS])
@pytest.mark.parametrize("name", KINDS)
def test_recorded_steps_give_the_samplers_tokens(harness: RunnerHarness, name: str, rows: tuple[int, ...]) -> None:
    changes = KINDS[name][1]
    want = eager(harness, rows, changes)
    got = decode(harness, rows, changes)
    np.testing.assert_array_equal(got, want)
    if name in ("top-p", "plain", "top-k"):
        assert len(np.unique(got)) > 1, "tokens vary, so that steps are told apart"


@pytest.mark.parametrize("name", ["greedy", "plain", "top-p", "top-k"])
def test_plain_batches_are_recorded_once(harness: RunnerHarness, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = {key: make(ROWS) for key, make in KINDS[name][1].items()}
    harness.step(*prompts(ROWS), **fixed)
    monkeypatch.setattr(
        "cardan.runner.step.NeutralStep._sample",
        lambda self, sampling, mask: pytest.fail("a decode step went through the sampler"),
    )
    for _ in range(3):
        harness.step(*[(row, [-1]) for row in ROWS], **fixed)
    assert harness.runner._recorded.num_recordings == 1


def test_kinds(harness: RunnerHarness) -> None:
    recorded = harness.runner._recorded
    assert recorded is not None
    rows = np.array(ROWS, np.int32)

    def kind(**changes: Any) -> Kind | None:
        return recorded.kind(greedy(rows, rows, harness.vocab, **changes))

    for name, (want, changes) in KINDS.items():
        fixed = {
            key: np.minimum(make(ROWS), harness.vocab) if key == "top_k" else make(ROWS)
            for key, make in changes.items()
        }
        if name != "penalty":
            assert kind(**fixed) is want, name
    assert recorded.kind(None) is None
    assert kind(presence_penalty=np.array([0, 0, 0, 1], np.float32)) is None
    assert kind(has_mask=np.array([0, 1, 0, 0], np.bool_)) is None
    assert (
        kind(bias_index=np.zeros(1, np.int32), bias_ids=np.zeros(1, np.int32), bias_values=np.ones(1, np.float32))
        is None
    )
    many = np.ones(recorded_sampling.MOST_ROWS + 1, np.int32)
    assert recorded.kind(greedy(many, many, harness.vocab)) is None


def test_rows_that_come_and_go_have_inputs_of_their_own(harness: RunnerHarness) -> None:
    """Two batches of as many rows share a recording; temperatures, seeds and rows are those of each."""
    hot, cold = {"temperature": constant(1.5)}, {"temperature": constant(0.4)}
    want = [eager(harness, rows, changes) for rows, changes in (((1, 2), hot), ((3, 4), cold), ((2, 4), hot))]
    got = []
    for rows, changes in (((1, 2), hot), ((3, 4), cold), ((2, 4), hot)):
        harness.slots.clear()
        got.append(decode(harness, rows, changes))
    np.testing.assert_array_equal(got, want)
    assert harness.runner._recorded.num_recordings == 1


def test_draws_that_reach_beyond_the_candidates_are_left_to_the_sampler(harness: RunnerHarness) -> None:
    changes = {"temperature": constant(40.0), "top_p": constant(0.99)}
    want = eager(harness, ROWS, changes)
    np.testing.assert_array_equal(decode(harness, ROWS, changes), want)
    recorded = harness.runner._recorded
    assert recorded is not None
    assert harness.vocab > recorded_sampling.first_width(harness.vocab), "there are tokens beyond the candidates"
    assert recorded._unsettled is not None, "the first step found that they are kept"


def test_a_step_that_samples_after_the_next_was_launched_keeps_its_logits(harness: RunnerHarness) -> None:
    want = eager(harness, (1,), {}, 2)[:, 0].tolist(), eager(harness, (2,), {}, 2)[:, 0].tolist()
    harness.step(*prompts((1,)))
    harness.step(*prompts((2,)))
    decode_once = [harness.step((row, [-1])).tokens[0] for row in (1, 2)]
    first = harness.runner.launch(harness.batch([(1, [-1])]))
    second = harness.runner.launch(harness.batch([(2, [-1])]))
    second.sample()
    first.sample()
    assert decode_once == [tokens[0] for tokens in want]
    assert [first.result().tokens[0], second.result().tokens[0]] == [tokens[1] for tokens in want]


def test_late_sampling_and_masks_are_obeyed(harness: RunnerHarness) -> None:
    harness.step(*prompts((1,)))
    likeliest = int(harness.step((1, [-1])).tokens[0])
    harness.slots.clear()

    def again(**given: Any) -> StepResult:
        harness.slots.clear()
        harness.step(*prompts((1,)))
        step = harness.runner.launch(harness.batch([(1, [-1])]))
        step.sample(**given)
        return step.result()

    rows = np.array([1], np.int32)
    late = greedy(
        rows,
        rows,
        harness.vocab,
        bias_index=np.zeros(1, np.int32),
        bias_ids=np.array([likeliest], np.int32),
        bias_values=np.array([-np.inf], np.float32),
    )
    assert again().tokens[0] == likeliest
    assert again(sampling=late).tokens[0] != likeliest
    allowed = np.zeros((1, -(-harness.vocab // 32)), np.uint32)
    allowed[0, 1] = 1 << 7
    masked = greedy(rows, rows, harness.vocab, has_mask=np.ones(1, np.bool_))
    assert again(sampling=masked, mask=allowed).tokens[0] == 39


def test_logprobs_come_with_recorded_tokens(harness: RunnerHarness) -> None:
    wanted = {"want_logprobs": constant(1, np.bool_), "top_logprobs": constant(3, np.int32)}
    fixed = {name: make(ROWS) for name, make in wanted.items()}

    def entries() -> list[Any]:
        harness.step(*prompts(ROWS), **fixed)
        steps = [harness.step(*[(row, [-1]) for row in ROWS], **fixed) for _ in range(3)]
        return [entry for step in steps for entry in step.logprobs]

    got = entries()
    assert harness.runner._recorded.num_recordings == 1
    harness.runner._recorded = None
    harness.slots.clear()
    assert got == entries()
    assert all(entry.top[0][1] == entry.logprob for entry in got)


def test_few_recordings_are_kept(harness: RunnerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_sampling, "MOST_RECORDINGS", 2)
    for rows in ((1,), (1, 2), (1, 2, 3)):
        harness.slots.clear()
        decode(harness, rows, {}, 2)
    assert harness.runner._recorded.num_recordings == 2
    harness.runner.close()
    assert harness.runner._recorded is None
