"""Whole steps on the stand-in: captured and eager ones agree, tokens stay on the device, and nothing waits for it."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from emulated_gpu import harness  # noqa: E402

from cardan.references.sampling import Knobs, adjust  # noqa: E402
from cardan.testing.conformance.tiny_checkpoint import TinyCheckpoint  # noqa: E402
from cardan.testing.conformance.tiny_configs import TINY_CONFIGS  # noqa: E402
from cardan.types import PenaltySeed  # noqa: E402
from cardan_kernels import rope  # noqa: E402
from cardan_torch.gpu.emulation import RuleError, no_waiting  # noqa: E402

BETWEEN = "between launch and result"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    config = {**TINY_CONFIGS["LlamaForCausalLM"], "num_hidden_layers": 1}
    return TinyCheckpoint(tmp_path_factory.mktemp("tiny"), config)


@pytest.fixture(scope="module", params=["cuda", pytest.param("rocm", marks=pytest.mark.exhaustive)])
def gpu(request, tiny):
    """Two rows that were prefilled."""
    found = harness(request.param, tiny.folder)
    found.rows = {1: [5, 6, 7], 2: [40, 41]}
    first = found.step(*found.rows.items())
    for row, token in zip(found.rows, first.tokens, strict=True):
        found.rows[row].append(int(token))
    return found


def decode(gpu, mask=None, **sampling):
    """Launch and sample a decode step whose tokens the host does not know."""
    step = gpu.runner.launch(gpu.batch([(row, [-1]) for row in gpu.rows], **sampling))
    step.sample(mask=mask)
    return step


def keep(gpu, step):
    result = step.result()
    for row, token in zip(gpu.rows, result.tokens, strict=True):
        gpu.rows[row].append(int(token))
    return result


def test_replayed_steps_give_the_tokens_of_the_reference_while_two_are_in_flight(gpu, tiny):
    before = decode(gpu)
    assert before.replayed
    with no_waiting(BETWEEN):
        after = decode(gpu)
    keep(gpu, before)
    keep(gpu, after)
    for ids in gpu.rows.values():
        logits = tiny.logits(tuple(ids))
        for place in range(len(ids) - 3, len(ids)):
            assert logits[place - 1].max() - logits[place - 1][ids[place]] < 1e-3
    graph = gpu.runner._graph
    assert graph.buckets == (2, 1)
    assert gpu.device.device.accelerator.captures == 2


DRAWS = {
    "greedy": {},
    "plain": {"temperature": np.full(2, 0.9, np.float32)},
    "filtered": {
        "temperature": np.full(2, 1.2, np.float32),
        "top_p": np.array([0.7, 1.0], np.float32),
        "top_k": np.array([97, 5], np.int32),
        "min_p": np.array([0.0, 0.1], np.float32),
    },
    "biased": {
        "bias_index": np.zeros(1, np.int32),
        "bias_ids": np.array([9], np.int32),
        "bias_values": np.array([50.0], np.float32),
    },
    "logprobs": {"want_logprobs": np.ones(2, np.bool_), "top_logprobs": np.full(2, 3, np.int32)},
}


@pytest.mark.parametrize("kind", DRAWS)
def test_no_kind_of_step_waits_between_its_launch_and_the_one_result_that_is_read(gpu, kind):
    keep(gpu, decode(gpu))
    with no_waiting(BETWEEN):
        step = decode(gpu, **DRAWS[kind])
    result = keep(gpu, step)
    if kind == "biased":
        assert result.tokens[0] == 9
    if kind == "logprobs":
        assert len(result.logprobs[0].top) == 3


PENALIZED = Knobs(frequency_penalty=0.4, presence_penalty=0.3, repetition_penalty=1.4)


def penalty_seed(row, ids):
    """Two tokens of a row count as its prompt, the others as its output."""
    seen, counts = np.unique(np.array(ids[2:], np.int32), return_counts=True)
    prompt = np.unique(np.array(ids[:2], np.int32))
    return PenaltySeed(row_id=row, prompt_ids=prompt, output_ids=seen, output_counts=counts.astype(np.int32))


def packed(allowed):
    bits = np.zeros((len(allowed), -(-allowed.shape[1] // 32) * 32), np.uint32)
    bits[:, : allowed.shape[1]] = allowed
    return (bits.reshape(len(allowed), -1, 32) << np.arange(32, dtype=np.uint32)).sum(axis=-1).astype(np.uint32)


def test_penalties_grammar_masks_and_biases_wait_for_nothing_and_choose_as_the_reference_does(gpu, tiny):
    keep(gpu, decode(gpu))
    start = {row: list(ids) for row, ids in gpu.rows.items()}
    fields = {
        name: np.full(2, getattr(PENALIZED, name), np.float32)
        for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")
    }
    allowed = np.random.default_rng(3).random((2, gpu.vocab)) < 0.5
    for turn in range(3):
        biased = np.array([int(np.flatnonzero(allowed[0])[turn])], np.int32)
        with no_waiting(BETWEEN):
            step = decode(
                gpu,
                packed(allowed),
                penalty_seeds=tuple(penalty_seed(*row) for row in start.items()) if turn == 0 else (),
                has_mask=np.array([True, False]),
                bias_index=np.zeros(1, np.int32),
                bias_ids=biased,
                bias_values=np.array([2.5], np.float32),
                **fields,
            )
        keep(gpu, step)
        for place, (row, ids) in enumerate(gpu.rows.items()):
            logits = tiny.logits(tuple(ids[:-1]))[-1]
            scores = adjust(logits, PENALIZED, ids[:2], ids[2:-1])
            if place == 0:
                scores[biased[0]] += 2.5
                scores = np.where(allowed[0], scores, -np.inf)
            assert scores.max() - scores[ids[-1]] < 1e-3, (turn, row)


def test_queries_and_keys_are_rotated_by_the_kernel_that_writes_keys(gpu, monkeypatch):
    def refused(*args, **kwargs):
        raise AssertionError("a kernel of its own")

    for name in ("rope", "write_kv"):
        monkeypatch.setattr(rope, name, refused)
    assert len(gpu.step((5, [7, 8, 9])).tokens) == 1


def test_the_net_would_find_a_read(gpu):
    with (
        pytest.raises(RuleError, match=r"\.item\(\) waits for the device between launch and result"),
        no_waiting(BETWEEN),
    ):
        gpu.runner._last_tokens.max().item()


def test_a_graph_reads_the_pool_where_it_was(gpu):
    """Taking the pool's memory away is found, as it would be on a GPU by what is read there."""
    keep(gpu, decode(gpu))
    pool = gpu.pool.pool
    held, pool.keys = pool.keys, [x.clone() for x in pool.keys]
    del held
    batch = gpu.batch([(row, [-1]) for row in gpu.rows])
    with pytest.raises(RuleError, match="memory that was given back"):
        gpu.runner.launch(batch)
