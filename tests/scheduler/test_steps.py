"""What a batch holds, and what the scheduler says of itself."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_harness import EOS, Harness, SamplingParams, request, settings

from cardan.scheduler import DecodeLogged, PrefillLogged, Scheduler
from cardan.types import FinishKind, LogprobParams, TableDelta, TableDeltas


def test_sampling_parameters_reach_their_rows() -> None:
    params = SamplingParams(
        max_new_tokens=3, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, frequency_penalty=0.2,
        presence_penalty=0.3, repetition_penalty=1.5, seed=42, logit_bias={3: -1.0},
    )  # fmt: skip
    harness = Harness(settings())
    harness.add(request("set", 6, params=params, logprobs=LogprobParams(output=True, top=2, token_ids=(1, 4))))
    harness.add(request("default", 4, max_new=3))
    sampling = harness.plan().batch.sampling
    for name, value in [
        ("temperature", [0.5, 1.0]), ("top_p", [0.9, 1.0]), ("min_p", [0.1, 0.0]), ("frequency_penalty", [0.2, 0.0]),
        ("presence_penalty", [0.3, 0.0]), ("repetition_penalty", [1.5, 1.0]),
    ]:  # fmt: skip
        assert getattr(sampling, name) == pytest.approx(np.asarray(value, np.float32)), name
        assert getattr(sampling, name).dtype == np.float32
    assert sampling.top_k.tolist() == [7, 97], "no limit is the whole vocabulary"
    assert sampling.seeds[0] == 42
    assert sampling.seeds.dtype == np.uint64
    assert sampling.positions.tolist() == [6, 4]
    assert (sampling.bias_index.tolist(), sampling.bias_ids.tolist(), sampling.bias_values.tolist()) == ([0], [3], [-1])
    assert sampling.want_logprobs.tolist() == [True, False]
    assert sampling.top_logprobs.tolist() == [2, 0]
    assert sampling.logprob_token_ids == ((1, 4), ())
    assert [seed.row_id for seed in sampling.penalty_seeds] == [sampling.row_ids[0]]


def test_penalty_counts_are_sent_once_and_again_after_a_retraction() -> None:
    harness = Harness(settings())
    params = SamplingParams(max_new_tokens=8, frequency_penalty=0.5)
    harness.add(request("a", [1, 2, 2], params=params), request("b", 4, max_new=8))
    for _ in range(3):
        harness.turn()
    assert [len(step.batch.sampling.penalty_seeds) for step in harness.steps] == [1, 0, 0]
    before = list(harness.requests["a"].output_ids)
    harness.scheduler._state.retract(harness.requests["a"], "pool full")
    (seed,) = harness.plan().batch.sampling.penalty_seeds
    assert seed.prompt_ids.tolist() == [1, 2]
    counts = dict(zip(seed.output_ids.tolist(), seed.output_counts.tolist(), strict=True))
    assert counts == {token: before.count(token) for token in before}


def test_what_would_end_a_request_too_early_is_forbidden_until_it_is_long_enough() -> None:
    harness = Harness(settings(), overlap=True)
    params = SamplingParams(max_new_tokens=6, min_new_tokens=3, stop_token_ids=(9, 500))
    harness.add(request("a", params=params, eos_ids=frozenset({EOS})))
    harness.run()
    banned = [sorted(step.batch.sampling.bias_ids.tolist()) for step in harness.steps]
    assert banned[:4] == [[EOS, 9], [EOS, 9], [EOS, 9], []]
    assert all((step.batch.sampling.bias_values == -np.inf).all() for step in harness.steps)


def test_ignoring_eos_ignores_eos_and_not_the_stops_one_named() -> None:
    one = request("a", params=SamplingParams(ignore_eos=True, stop_token_ids=(9,)), eos_ids=frozenset({EOS}))
    assert one.stop_ids == {9}
    assert request("b", eos_ids=frozenset({EOS})).stop_ids == {EOS}


def test_all_groups_keep_a_token_in_the_same_slot() -> None:
    harness = Harness(settings(num_groups=3))
    harness.add(request("a", 5, max_new=2))
    harness.run()
    for step in harness.steps:
        assert step.batch.out_slots.shape == (3, step.batch.num_tokens)
        assert (step.batch.out_slots == step.batch.out_slots[0]).all()


def test_table_deltas_read_as_runs() -> None:
    deltas = TableDeltas(
        rows=np.asarray([1, 1, 2, 1], np.int32),
        positions=np.asarray([4, 5, 0, 9], np.int32),
        slots=np.asarray([[7, 8, 9, 3]], np.int32),
    )
    assert len(deltas) == 3
    assert [(delta.row_id, delta.start, delta.slots.tolist()) for delta in deltas] == [
        (1, 4, [[7, 8]]), (2, 0, [[9]]), (1, 9, [[3]]),
    ]  # fmt: skip
    assert isinstance(deltas[1], TableDelta)
    empty = TableDeltas(rows=np.empty(0, np.int32), positions=np.empty(0, np.int32), slots=np.empty((1, 0), np.int32))
    assert list(empty) == []
    assert not empty


def test_requests_that_wait_for_a_grammar_run_once_it_is_ready() -> None:
    harness = Harness(settings())
    harness.add(request("g", needs_grammar=True, max_new=2), request("bad", needs_grammar=True))
    assert not harness.scheduler.has_work
    assert harness.plan() is None
    assert harness.scheduler.stats().num_grammar_queued == 2
    harness.scheduler.grammar_failed("bad", "no such rule")
    harness.take(harness.scheduler.take_outputs())
    assert harness.ends["bad"].finish_reason.message == "no such rule"
    assert harness.ends["bad"].finish_reason.refused
    harness.scheduler.grammar_ready("g")
    harness.scheduler.grammar_ready("unknown")
    harness.scheduler.grammar_failed("unknown", "")
    assert harness.plan().batch.sampling.has_mask.tolist() == [True]
    harness.commit()
    harness.run()
    assert len(harness.tokens["g"]) == 2


def test_plain_tokens_are_columnar_and_all_else_is_detailed() -> None:
    harness = Harness(settings())
    harness.add(request("a", max_new=3), request("b", max_new=3, logprobs=LogprobParams(output=True)))
    kinds = []
    for _ in range(3):
        scheduled = harness.plan()
        _, result = harness.flying.popleft()
        outputs = harness.scheduler.commit(scheduled, result)
        kinds.append((outputs.rids, [output.rid for output in outputs.detailed]))
    assert kinds == [([], ["a", "b"]), (["a"], ["b"]), ([], ["a", "b"])]
    assert not harness.scheduler.take_outputs()


def test_the_time_in_the_queue_is_measured_from_arrival() -> None:
    scheduler = Harness(settings())
    scheduler.now_s = 5.0
    scheduler.add(request("a", max_new=2, arrival_s=4.0))
    scheduler.run()
    assert scheduler.ends["a"].queue_s == pytest.approx(1.01)


def test_a_line_for_each_prefill_pass_and_one_for_forty_decode_steps() -> None:
    harness = Harness(settings(chunked_prefill_size=16))
    harness.add(request("a", 30, max_new=90), request("b", 20, max_new=2))
    harness.run()
    events = harness.scheduler.take_events()
    first = next(event for event in events if isinstance(event, PrefillLogged))
    assert (first.new_seq, first.new_token, first.cached_token, first.queue) == (1, 16, 0, 1)
    assert first.pending_token == 14 + 20
    assert "new-seq: 1, new-token: 16" in first.describe(graph=True)
    decodes = [event for event in events if isinstance(event, DecodeLogged)]
    assert len(decodes) == harness.scheduler.stats().totals["decode_steps"] // 40 == 2
    assert decodes[1].gen_throughput == pytest.approx(100, rel=0.1), "a token each 10 ms"
    assert "running: 1" in decodes[1].describe()
    assert harness.scheduler.take_events() == []


def test_gauges_move_and_totals_add_up() -> None:
    harness = Harness(settings(max_running_requests=1))
    harness.add(request("a", 20, max_new=5), request("b", 20, max_new=5))
    harness.turn()
    stats = harness.scheduler.stats()
    assert (stats.num_running, stats.num_queued, stats.used_tokens) == (1, 1, 20)
    harness.run()
    stats = harness.scheduler.stats()
    assert (stats.num_running, stats.num_queued, stats.used_tokens) == (0, 0, 0)
    assert stats.cached_tokens == 48
    totals = stats.totals
    assert (totals["requests"], totals["finished_requests"], totals["generated_tokens"]) == (2, 2, 10)
    assert harness.scheduler.evict_cache(1) == 4, "a leaf goes whole: the four output tokens whose KV was computed"
    assert harness.scheduler.stats().totals["evicted_tokens"] == 4


def test_the_cache_is_flushed_only_when_no_one_runs() -> None:
    harness = Harness(settings())
    harness.add(request("a", max_new=2))
    assert not harness.scheduler.flush_cache()
    harness.run()
    assert harness.scheduler.flush_cache()
    assert harness.scheduler.stats().cached_tokens == 0


def test_a_finish_reason_says_what_ended_it() -> None:
    harness = Harness(settings())
    harness.add(request("length", max_new=3))
    harness.run()
    reason = harness.ends["length"].finish_reason
    assert (reason.kind, reason.length) == (FinishKind.LENGTH, 3)
    token = harness.tokens["length"][1]
    harness.add(request("stop", harness.requests["length"].prompt.tolist(), max_new=3))
    harness.requests["stop"].seed = harness.requests["length"].seed
    harness.requests["stop"].params = SamplingParams(max_new_tokens=3, stop_token_ids=(token,))
    harness.run()
    reason = harness.ends["stop"].finish_reason
    assert (reason.kind, reason.matched) == (FinishKind.STOP, token)


def test_a_cache_of_ones_own_takes_the_place_of_the_tree() -> None:
    from cardan.cache import NoPrefixCache

    scheduler = Scheduler(settings(), cache=NoPrefixCache())
    assert isinstance(scheduler._state.memory.cache, NoPrefixCache)
