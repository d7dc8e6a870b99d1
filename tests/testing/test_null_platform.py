"""The null platform: what it reads back is what the tables say, and wrong bookkeeping does not go unnoticed."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from cardan.errors import MemoryPlanError
from cardan.platform import Evidence, Feature, Memory, MemoryRequest, Support
from cardan.testing.null_platform import NullLoadedModel, NullPlatform, platform
from cardan.testing.null_runner import NullKVPool, NullRunner, NullTiming, _RowState
from cardan.testing.null_tokens import SequenceHasher, Vocabulary, expected_tokens
from cardan.types import (
    Batch,
    ForwardMode,
    KVLayout,
    LayerKV,
    PenaltySeed,
    PromptLogprobs,
    SamplingBatch,
    SamplingParams,
    TableDelta,
    TableDeltas,
)

VOCABULARY = Vocabulary(size=260, eos_ids=(258,))


def layer(index: int, group: int) -> LayerKV:
    return LayerKV(index=index, group=group, q_heads=1, kv_heads=1, k_dim=8, v_dim=8, scale=1.0)


LAYOUT = KVLayout(layers=(layer(0, 0), layer(1, 1)), page_size=1, dtype="float32")


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


NO_TIMING = NullTiming()


def make_runner(timing: NullTiming = NO_TIMING, vocabulary: Vocabulary = VOCABULARY) -> NullRunner:
    return NullRunner(NullKVPool(LAYOUT, 64, 4, 32), vocabulary, timing)


def sampling(params: SamplingParams, position: int, row: int = 1, **changes) -> SamplingBatch:
    bias = params.logit_bias
    made = SamplingBatch(
        row_ids=ints(row),
        temperature=np.array([params.temperature], np.float32),
        top_k=ints(params.top_k if params.top_k > 0 else VOCABULARY.size),
        top_p=np.array([params.top_p], np.float32),
        min_p=np.array([params.min_p], np.float32),
        seeds=np.array([params.seed or 0], np.uint64),
        positions=ints(position),
        frequency_penalty=np.array([params.frequency_penalty], np.float32),
        presence_penalty=np.array([params.presence_penalty], np.float32),
        repetition_penalty=np.array([params.repetition_penalty], np.float32),
        bias_index=np.zeros(len(bias), np.int32),
        bias_ids=ints(*bias),
        bias_values=np.array(list(bias.values()), np.float32),
        want_logprobs=np.array([False]),
        top_logprobs=ints(0),
        has_mask=np.array([False]),
    )
    return replace(made, **changes)


def step_batch(ids, start, slots, params=None, row=1, **changes) -> Batch:
    """Tokens ``ids`` at positions from ``start`` in ``slots``; samples from the last one when ``params`` are given."""
    length = start + len(ids)
    both = np.tile(ints(*slots), (2, 1))
    made = Batch(
        mode=ForwardMode.EXTEND,
        input_ids=ints(*ids),
        positions=np.arange(start, length, dtype=np.int32),
        query_starts=ints(0, len(ids)),
        seq_lens=ints(length),
        row_ids=ints(row),
        out_slots=both,
        table_deltas=(TableDelta(row_id=row, start=start, slots=both),),
        logits_at=ints(len(ids) - 1) if params else ints(),
        sampling=sampling(params, length, row) if params else None,
    )
    return replace(made, **changes)


def run(runner: NullRunner, batch: Batch):
    step = runner.launch(batch)
    step.sample()
    return step.result()


def generate(params: SamplingParams, count: int, prompt=(5, 6, 7), penalties: bool = False) -> list[int]:
    """Two prefill chunks in scattered slots, then decode steps that take their input from the device."""
    runner = make_runner()
    run(runner, step_batch(prompt[:2], 0, [40, 9]))
    first = step_batch(prompt[2:], 2, [17 + i for i in range(len(prompt) - 2)], params)
    if penalties:
        seed = PenaltySeed(row_id=1, prompt_ids=ints(*sorted(set(prompt))), output_ids=ints(), output_counts=ints())
        first = replace(first, sampling=replace(first.sampling, penalty_seeds=(seed,)))
    tokens = [int(run(runner, first).tokens[0])]
    for index in range(count - 1):
        at = len(prompt) + index
        tokens.append(int(run(runner, step_batch([-1], at, [60 - index], params)).tokens[0]))
    return tokens


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.7, seed=3, top_p=0.9, top_k=50, min_p=0.1),
        SamplingParams(temperature=0, logit_bias={77: 100.0}),
        SamplingParams(temperature=0, logit_bias={77: 2.5, 3: -1.0}),
    ],
    ids=["greedy", "sampled", "forced", "biased"],
)
def test_tokens_are_those_of_the_sequence_alone(params):
    assert generate(params, 8) == expected_tokens((5, 6, 7), params, VOCABULARY, 8)


def test_penalties_follow_the_seeds_and_the_output():
    params = SamplingParams(temperature=0, frequency_penalty=0.5, repetition_penalty=1.2)
    expected = expected_tokens((5, 6, 7), params, VOCABULARY, 8)
    assert generate(params, 8, penalties=True) == expected
    assert generate(params, 8, penalties=False) != expected


def test_every_sampling_field_changes_the_tokens():
    base = SamplingParams(temperature=1.0, seed=1)
    seen = {tuple(expected_tokens((1, 2), base, VOCABULARY, 8))}
    fields = (
        {"temperature": 0.5}, {"seed": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 5}, {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5}, {"repetition_penalty": 1.5}, {"temperature": 0.0},
        {"logit_bias": {5: 1.5}}, {"logit_bias": {5: -1.5}}, {"logit_bias": {6: 1.5}}, {"logit_bias": {5: 1.5, 6: 1.5}},
    )  # fmt: skip
    for change in fields:
        seen.add(tuple(expected_tokens((1, 2), replace(base, **change), VOCABULARY, 8)))
    assert len(seen) == len(fields) + 1


def test_top_k_of_one_is_greedy():
    greedy = expected_tokens((1, 2), SamplingParams(temperature=0), VOCABULARY, 8)
    assert expected_tokens((1, 2), SamplingParams(temperature=2.0, seed=9, top_k=1), VOCABULARY, 8) == greedy


def test_order_and_length_change_the_hash():
    hasher = SequenceHasher()
    hashes = {hasher(ids) for ids in ([1, 2, 3], [3, 2, 1], [1, 2], [1, 2, 0], [0, 1, 2], range(5000))}
    assert len(hashes) == 6


def test_a_slot_that_the_table_does_not_name_raises():
    runner = make_runner()
    wrong = step_batch([5, 6], 0, [3, 4], out_slots=np.tile(ints(3, 5), (2, 1)))
    with pytest.raises(RuntimeError, match="tables name"):
        runner.launch(wrong)


def test_flat_changes_of_tables_are_those_of_single_ones():
    pools = [NullKVPool(LAYOUT, 64, 4, 8) for _ in range(2)]
    flat = TableDeltas(rows=ints(1, 1, 2), positions=ints(0, 1, 7), slots=np.tile(ints(5, 6, 9), (2, 1)))
    pools[0].update_tables(flat)
    pools[1].update_tables(tuple(flat))
    assert (pools[0].tables == pools[1].tables).all()
    for changes in (TableDeltas(rows=ints(1), positions=ints(8), slots=np.ones((2, 1), np.int32)),):
        for given in (changes, tuple(changes)):
            with pytest.raises(
                RuntimeError, match=r"has room for 8 tokens, got position 8 for row 1\. Let sequences end"
            ):
                pools[0].update_tables(given)


def test_reading_an_unwritten_slot_raises():
    runner = make_runner()
    delta = TableDelta(row_id=1, start=0, slots=np.tile(ints(3, 4, 5), (2, 1)))
    batch = step_batch([7], 2, [5], SamplingParams(), table_deltas=(delta,))
    with pytest.raises(RuntimeError, match="never written"):
        runner.launch(batch)


def test_a_live_row_may_not_write_to_padding():
    with pytest.raises(RuntimeError, match="padding"):
        make_runner().launch(step_batch([5], 0, [0]))


def test_another_tokens_slot_changes_the_token():
    runner = make_runner()
    run(runner, step_batch([5, 6], 0, [3, 4]))
    right = run(runner, step_batch([7], 2, [5], SamplingParams(temperature=0))).tokens[0]
    delta = TableDelta(row_id=1, start=0, slots=np.tile(ints(4, 4, 5), (2, 1)))
    swapped = step_batch([7], 2, [5], SamplingParams(temperature=0), table_deltas=(delta,))
    assert run(runner, swapped).tokens[0] != right


@pytest.mark.parametrize("known", [False, True], ids=["never seen", "never sampled"])
def test_a_row_without_a_sampled_token_cannot_go_on(known):
    runner = make_runner()
    if known:
        runner._rows[1] = _RowState()
    with pytest.raises(
        RuntimeError, match=r"must stand for a row's last sampled token, got row 1, which has none\. Give"
    ):
        runner.launch(step_batch([-1], 0, [1]))


def test_a_device_runs_only_what_is_its_own():
    device = open_device()
    loaded, pool = NullLoadedModel(VOCABULARY), NullKVPool(LAYOUT, 8, 2, 8)
    assert device.runner(loaded, pool, None) is not None
    with pytest.raises(TypeError, match="the model must come from this device's load, got str"):
        device.runner("a model", pool, None)
    with pytest.raises(TypeError, match="the pool must come from this device's allocate_kv, got dict"):
        device.runner(loaded, {}, None)


def test_a_third_step_in_flight_raises():
    runner = make_runner()
    for slot in (1, 2):
        runner.launch(step_batch([5], slot - 1, [slot])).sample()
    with pytest.raises(RuntimeError, match="3 steps are in flight"):
        runner.launch(step_batch([5], 2, [3]))


def test_result_needs_sample_and_sample_only_once():
    step = make_runner().launch(step_batch([5], 0, [1]))
    with pytest.raises(RuntimeError, match="before Step"):
        step.result()
    step.sample()
    with pytest.raises(RuntimeError, match="twice"):
        step.sample()
    assert step.result() is step.result()


def test_a_mask_leaves_only_what_it_allows():
    words = np.zeros((1, (VOCABULARY.size + 31) // 32), np.uint32)
    words[0, 99 // 32] |= np.uint32(1 << (99 % 32))
    params = SamplingParams(temperature=0)
    step = make_runner().launch(step_batch([5], 0, [1], params))
    step.sample(sampling(params, 1, has_mask=np.array([True])), words)
    assert step.result().tokens.tolist() == [99]


def test_a_mask_that_allows_nothing_fails_the_row():
    params = SamplingParams(temperature=0)
    step = make_runner().launch(step_batch([5], 0, [1], params))
    step.sample(sampling(params, 1, has_mask=np.array([True])), np.zeros((1, 9), np.uint32))
    assert step.result().failed.tolist() == [True]


def test_logprobs_are_ordered_and_agree_with_the_token():
    params = SamplingParams(temperature=0)
    batch = step_batch([5], 0, [1], params)
    wanted = sampling(params, 1, want_logprobs=np.array([True]), top_logprobs=ints(3), logprob_token_ids=((1, 2),))
    result = run(make_runner(), replace(batch, sampling=wanted))
    logprobs = result.logprobs[0]
    assert logprobs.top[0] == (result.tokens[0], logprobs.logprob)
    assert [value for _, value in logprobs.top] == [-0.5, -1.0, -1.5]
    assert [token for token, _ in logprobs.chosen] == [1, 2]


def test_prompt_logprobs_depend_on_the_prefix():
    wanted = PromptLogprobs(token_index=ints(0, 1), targets=ints(6, 6), top=ints(1, 0))
    result = run(make_runner(), step_batch([5, 6], 0, [1, 2], prompt_logprobs=wanted))
    first, second = result.prompt_logprobs
    assert first.logprob != second.logprob
    assert len(first.top) == 1
    assert second.top == ()


def test_a_row_that_ends_with_the_nan_token_fails_and_others_do_not():
    runner = make_runner(NullTiming(nan_token=66))
    assert run(runner, step_batch([66, 5], 0, [1, 2], SamplingParams())).failed.tolist() == [False]
    assert run(runner, step_batch([5, 66], 0, [3, 4], SamplingParams(), row=2)).failed.tolist() == [True]


def test_crash_after_some_steps():
    runner = make_runner(NullTiming(crash_after=1))
    run(runner, step_batch([5], 0, [1]))
    with pytest.raises(RuntimeError, match="told to fail after 1 steps"):
        runner.launch(step_batch([5], 1, [2]))


def test_simulated_time_passes_at_the_result_and_not_at_the_launch():
    runner = make_runner(NullTiming(step_s=0.03, token_s=0.01))
    start = time.monotonic()
    step = runner.launch(step_batch([5, 6], 0, [1, 2]))
    step.sample()
    assert time.monotonic() - start < 0.03
    step.result()
    assert time.monotonic() - start >= 0.05


def test_ends_of_sequence_come_with_their_probability_only():
    often = Vocabulary(size=260, eos_ids=(258,), eos_probability=0.25)
    params = SamplingParams(temperature=0, ignore_eos=True)
    tokens = expected_tokens((1,), params, often, 2000)
    assert 400 < tokens.count(258) < 600
    assert 258 not in expected_tokens((1,), params, VOCABULARY, 2000)


def test_min_new_tokens_forbids_the_end():
    always = Vocabulary(size=260, eos_ids=(258,), eos_probability=1.0)
    assert len(expected_tokens((1,), SamplingParams(temperature=0, min_new_tokens=5), always)) == 6


def test_the_platform_answers_for_every_feature():
    capabilities = NullPlatform().capabilities(platform.devices()[0])
    for feature in Feature:
        capability = capabilities.get(feature)
        assert capability.reason
        assert capability.evidence is Evidence.SIMULATOR
    assert capabilities.get(Feature.GRAPH).support is Support.UNSUPPORTED
    assert "Q4_1" in capabilities.family("weights")
    assert platform.probe().score == 0
    assert platform.probe().usable


def open_device(**options):
    defaults = {option.name: option.default for option in platform.options()}
    return platform.open(platform.devices()[0], defaults | options)


def memory_request(device, **changes) -> MemoryRequest:
    made = MemoryRequest(
        memory=device.memory(), weight_bytes=0, activation_bytes=0, graph_bytes=0, bytes_per_slot=1024, page_size=4,
        min_slots=16, useful_slots=1 << 30,
    )  # fmt: skip
    return replace(made, **changes)


def test_memory_is_what_the_option_claims():
    device = open_device(memory_mb=2)
    assert device.memory() == Memory(total=2 << 20, free=2 << 20)
    assert device.plan_memory(memory_request(device)).num_slots == 2048 - 4, "a padding page"
    assert device.plan_memory(memory_request(device, max_total_tokens=103)).num_slots == 100


def test_a_pool_that_does_not_fit_is_refused():
    device = open_device(memory_mb=1)
    with pytest.raises(MemoryPlanError, match="--max-total-tokens 5000 needs 5120000 bytes"):
        device.plan_memory(memory_request(device, max_total_tokens=5000))
    with pytest.raises(MemoryPlanError, match="at least 4096 tokens"):
        device.plan_memory(memory_request(device, min_slots=4096))
