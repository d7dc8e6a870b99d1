"""The engine within one process: both loops give the tokens that each request gets alone, whatever the pool."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from cardan.engine.core import EngineCore
from cardan.engine.loops import InFlight, LoopState, overlapped_turn, plain_turn
from cardan.engine.messages import Generate
from cardan.engine.model_files import load_model_tokenizer
from cardan.engine.preparation import decode_buckets, prepare, resolve_plan, scheduler_settings
from cardan.errors import ConfigError, PromptTooLongError, QueueFullError
from cardan.grammar_spec import GrammarKind, GrammarSpec
from cardan.platform import SettingSource
from cardan.scheduler import OutputBatch
from cardan.testing.null_platform import NullDevice
from cardan.testing.null_runner import NullStep
from cardan.testing.null_tokens import Vocabulary, expected_tokens
from cardan.types import FinishKind, ForwardMode, LogprobParams, SamplingParams


@pytest.fixture(scope="session")
def make_core(null_config):
    def make(clock=None, **options):
        config = null_config(**options)
        extra = {} if clock is None else {"clock": clock}
        return EngineCore(prepare(config), load_model_tokenizer(config.model), **extra)

    return make


def generate(wire_id, prompt, params=None, logprobs=None, **fields) -> Generate:
    fields = {"priority": 0, "cache_salt": None, "routing_key": None, "arrival_s": 0.0, **fields}
    return Generate(wire_id, list(prompt), params or SamplingParams(), logprobs or LogprobParams(), **fields)


class Collected:
    """News of a core by request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, object] = {}

    def take(self, batches: list[OutputBatch]) -> None:
        for batch in batches:
            for wire_id, tokens in batch.tokens():
                assert wire_id not in self.last, f"{wire_id} has news after its end"
                self.tokens.setdefault(wire_id, []).extend(tokens)
            for output in batch.detailed:
                if output.finish_reason is not None:
                    self.last[output.rid] = output


def finish(core: EngineCore, collected: Collected | None = None, check: bool = True) -> Collected:
    collected = collected or Collected()
    turns = 0
    while core.has_work:
        core.turn()
        collected.take(core.take_news())
        turns += 1
        assert turns < 20_000
        if check:
            core.scheduler.check_invariants()
    return collected


def some_params(rng: random.Random, count: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=count,
        min_new_tokens=rng.choice((0, 0, 3)) if count > 3 else 0,
        temperature=rng.choice((0.0, 0.8)),
        top_k=rng.choice((-1, 20)),
        seed=rng.randrange(2**64),
        frequency_penalty=rng.choice((0.0, 0.5)),
        logit_bias=rng.choice(({}, {65: -100.0})),
    )


OPTIONS = {
    "roomy": {"max_total_tokens": 4000},
    "tiny-pool": {"max_total_tokens": 150, "schedule_conservativeness": 0.01},
    "pages": {"max_total_tokens": 320, "page_size": 16, "chunked_prefill_size": 32},
    "small-chunks": {"max_total_tokens": 400, "chunked_prefill_size": 8},
    "mixed": {"max_total_tokens": 400, "chunked_prefill_size": 16, "enable_mixed_chunk": True},
    "no-cache": {"max_total_tokens": 200, "disable_radix_cache": True},
    "few-rows": {"max_total_tokens": 400, "max_running_requests": 3, "schedule_policy": "lpm"},
}


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tokens_are_those_of_each_request_alone(make_core, options, overlap):
    rng = random.Random(7)
    core = make_core(**options, disable_overlap_schedule=not overlap, platform_options={"eos_probability": 0.02})
    vocabulary = Vocabulary(size=260, eos_ids=(258,), eos_probability=0.02)
    shared = [rng.randrange(256) for _ in range(40)]
    wanted = {}
    collected = Collected()
    for index in range(24):
        prompt = shared[: rng.randrange(41)] + [rng.randrange(256) for _ in range(rng.randrange(1, 20))]
        params = some_params(rng, rng.randrange(1, 30))
        wanted[f"r{index}"] = expected_tokens(prompt, params, vocabulary)
        core.add(generate(f"r{index}", prompt, params))
        if index % 3 == 0:
            core.turn()
            collected.take(core.take_news())
    finish(core, collected)
    assert collected.tokens == wanted
    stats = core.stats()
    assert (stats.num_running, stats.num_queued, stats.used_tokens) == (0, 0, 0)
    if options == OPTIONS["tiny-pool"]:
        assert stats.totals.get("retractions", 0) > 0


def test_the_plain_loop_is_counted_with_its_reason(make_core):
    totals = make_core(disable_overlap_schedule=True).stats().totals
    assert totals["fallback:plain loop (--disable-overlap-schedule)"] == 1
    assert not any(name.startswith("fallback") for name in make_core().stats().totals)


def test_the_overlapped_loop_launches_before_it_reads(make_core):
    order = []
    core = make_core()
    runner = core._loop.runner
    launch, commit = runner.launch, core.scheduler.commit
    runner.launch = lambda batch: order.append("launch") or launch(batch)
    core.scheduler.commit = lambda *args: order.append("commit") or commit(*args)
    core.add(generate("a", [1, 2], SamplingParams(max_new_tokens=3)))
    finish(core)
    assert order == ["launch", "launch", "commit", "launch", "commit", "commit"]


def test_rows_that_wait_for_a_mask_sample_after_the_commit():
    events = []

    class FakeStep:
        replayed = False

        def __init__(self, number):
            self.number = number

        def sample(self, sampling=None, mask=None):
            events.append(("sample", self.number, mask))

        def result(self):
            return None

    class FakeScheduler:
        planned = 0

        def plan(self, now_s):
            self.planned += 1
            masked = type("S", (), {"has_mask": np.array([True])})()
            batch = type("B", (), {"sampling": masked, "number": self.planned})()
            return type("P", (), {"batch": batch, "number": self.planned})()

        def commit(self, scheduled, result, sampled):
            events.append(("commit", scheduled.number))
            return OutputBatch()

    class FakeRunner:
        def launch(self, batch):
            events.append(("launch", batch.number))
            return FakeStep(batch.number)

    class Masks:
        def masks(self, scheduled):
            return f"mask {scheduled.number}"

    state = LoopState(FakeScheduler(), FakeRunner(), Masks())
    overlapped_turn(state)
    overlapped_turn(state)
    assert events == [
        ("launch", 1),
        ("sample", 1, "mask 1"),
        ("launch", 2),
        ("commit", 1),
        ("sample", 2, "mask 2"),
    ]
    assert isinstance(state.in_flight, InFlight)
    events.clear()
    plain_turn(LoopState(FakeScheduler(), FakeRunner(), Masks()))
    assert events == [("launch", 1), ("sample", 1, "mask 1"), ("commit", 1)]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
def test_aborts_give_everything_back_and_say_so(make_core, overlap):
    core = make_core(max_total_tokens=300, disable_overlap_schedule=not overlap)
    for index in range(20):
        core.add(generate(f"r{index}", [index, 1, 2], SamplingParams(max_new_tokens=50, ignore_eos=True)))
    collected = Collected()
    for _ in range(5):
        core.turn()
        collected.take(core.take_news())
    core.abort("r3")
    core.abort("nobody")
    core.turn()
    collected.take(core.take_news())
    assert collected.last["r3"].finish_reason.kind is FinishKind.ABORT
    core.abort(None)
    finish(core, collected)
    assert {output.finish_reason.kind for output in collected.last.values()} == {FinishKind.ABORT}
    assert len(collected.last) == 20
    assert core.stats().used_tokens == 0
    assert core.stats().totals["aborted_requests"] == 20


@pytest.mark.parametrize("seed", range(6))
def test_aborts_at_any_time_change_no_other_request(make_core, vocabulary, seed):
    rng = random.Random(seed)
    core = make_core(
        max_total_tokens=200,
        chunked_prefill_size=rng.choice((8, 64)),
        schedule_conservativeness=0.01,
        schedule_policy=rng.choice(("fcfs", "lpm", "random", "lof")),
        disable_overlap_schedule=seed % 2 == 0,
    )
    wanted, aborted, collected = {}, set(), Collected()
    for index in range(60):
        prompt = [7] * rng.randrange(1, 30) + [rng.randrange(256)]
        params = SamplingParams(max_new_tokens=rng.randrange(1, 30), temperature=0)
        wanted[f"r{index}"] = expected_tokens(prompt, params, vocabulary)
        core.add(generate(f"r{index}", prompt, params))
        for _ in range(rng.randrange(4)):
            core.turn()
            collected.take(core.take_news())
            core.scheduler.check_invariants()
        if rng.random() < 0.3:
            victim = f"r{rng.randrange(index + 1)}"
            core.abort(victim)
            aborted.add(victim)
    finish(core, collected)
    assert set(collected.last) == set(wanted)
    for wire_id, output in collected.last.items():
        tokens = collected.tokens.get(wire_id, [])
        if output.finish_reason.kind is FinishKind.ABORT:
            assert wire_id in aborted
            assert tokens == wanted[wire_id][: len(tokens)]
        else:
            assert tokens == wanted[wire_id]
    assert core.stats().used_tokens == 0


def test_a_row_that_gives_nan_fails_alone(make_core, vocabulary):
    core = make_core(platform_options={"nan_token": 66})
    params = SamplingParams(max_new_tokens=4, temperature=0, logit_bias={66: -100.0})
    core.add(generate("bad", [1, 66], params))
    core.add(generate("good", [66, 1], params))
    collected = finish(core)
    assert collected.last["bad"].finish_reason.kind is FinishKind.ERROR
    assert "NaN" in collected.last["bad"].finish_reason.message
    assert collected.tokens["good"] == expected_tokens([66, 1], params, vocabulary)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
def test_a_row_that_gives_nan_is_the_devices_fault_whatever_the_request_forbids(make_core, overlap):
    core = make_core(disable_overlap_schedule=not overlap, platform_options={"nan_token": 66})
    grammar = GrammarSpec(kind=GrammarKind.REGEX, text="[a-f]{6}")
    forbids = {"grammar": grammar, "logit_bias": {97: -1e300}, "min_new_tokens": 2, "stop_token_ids": (98,)}
    core.add(generate("nan", [1, 66], SamplingParams(max_new_tokens=6, **forbids)))
    forbids["logit_bias"] = dict.fromkeys(range(97, 103), -1e300)
    core.add(generate("empty", [66, 1], SamplingParams(max_new_tokens=6, **forbids)))
    collected = Collected()
    while core.has_work or core.awaits_grammars:
        core.take_grammars()
        core.turn()
        collected.take(core.take_news())
    nan, empty = (collected.last[one].finish_reason for one in ("nan", "empty"))
    assert (nan.kind, nan.code) == (FinishKind.ERROR, None)
    assert "held NaN" in nan.message
    assert (empty.kind, empty.code) == (FinishKind.ERROR, "no_token_allowed")


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
def test_what_a_failed_row_computed_is_given_to_nobody(make_core, overlap):
    options = {
        "disable_overlap_schedule": not overlap,
        "chunked_prefill_size": 4,
        "platform_options": {"nan_token": 66},
    }
    core = make_core(**options)
    core.add(generate("warm", [1, 2, 3], SamplingParams(max_new_tokens=0)))
    finish(core)
    params = SamplingParams(max_new_tokens=4, temperature=0, logit_bias={66: -100.0})
    for wire_id in ("first", "second"):
        core.add(generate(wire_id, [1, 2, 3, 4, 5, 6, 7, 8, 9, 66], params))
        last = finish(core).last[wire_id]
        assert last.finish_reason.kind is FinishKind.ERROR
        assert last.num_cached_tokens == 3
    assert core.stats().cached_tokens == 3
    assert core.flush_cache()


def test_prompt_logprobs_are_the_same_with_and_without_a_cached_prefix(make_core):
    core = make_core(chunked_prefill_size=4)
    wanted = LogprobParams(output=True, prompt_start=0, top=2, token_ids=(9,))
    seen = []
    for wire_id in ("cold", "warm"):
        core.add(generate(wire_id, range(10, 20), SamplingParams(max_new_tokens=1, temperature=0), wanted))
        seen.append(finish(core).last[wire_id])
    cold, warm = seen
    assert cold.prompt_logprobs == warm.prompt_logprobs
    assert cold.prompt_logprobs[0] is None
    assert len(cold.prompt_logprobs) == 10
    assert cold.logprobs == warm.logprobs


def test_refusals_leave_nothing(make_core):
    core = make_core(max_total_tokens=50, max_queued_requests=1)
    with pytest.raises(PromptTooLongError, match="60 tokens, but at most"):
        core.add(generate("long", [1] * 60))
    core.add(generate("one", [1]))
    with pytest.raises(QueueFullError, match="--max-queued-requests"):
        core.add(generate("two", [2]))
    assert core.stats().num_queued == 1


def test_the_cache_is_flushed_only_when_nothing_runs(make_core):
    core = make_core()
    core.add(generate("a", range(30), SamplingParams(max_new_tokens=2)))
    core.turn()
    assert not core.flush_cache()
    finish(core)
    assert core.stats().cached_tokens > 0
    assert core.flush_cache()
    assert core.stats().cached_tokens == 0


def test_cache_is_given_up_when_memory_is_short(make_core, monkeypatch):
    now = [0.0]
    core = make_core(clock=lambda: now[0], max_total_tokens=100)
    core.add(generate("a", range(60), SamplingParams(max_new_tokens=2)))
    finish(core)
    cached = core.stats().cached_tokens
    monkeypatch.setattr(NullDevice, "under_pressure", lambda self: True)
    core.turn()
    assert core.stats().cached_tokens == cached, "asked for at most once a second"
    now[0] = 2.0
    core.turn()
    assert core.stats().cached_tokens <= cached - 25
    assert core.stats().totals["pressure_evictions"] == 1
    core.scheduler.check_invariants()


def test_what_happens_is_logged(make_core, caplog):
    core = make_core(max_total_tokens=60, disable_overlap_schedule=True, schedule_conservativeness=0.01)
    for index in range(4):
        core.add(generate(f"r{index}", [index] * 8, SamplingParams(max_new_tokens=40)))
    finish(core)
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("Prefill batch, new-seq: ") and "pending-token" in line for line in lines)
    assert any(line.startswith("Decode batch, running: ") and "gen throughput" in line for line in lines)
    assert any(line.startswith("Retracted r") for line in lines)
    assert lines.count("Fallback: plain loop (--disable-overlap-schedule)") == 1


def test_replayed_steps_are_counted_and_logged(make_core, caplog, monkeypatch):
    decoding = property(lambda step: step._batch.mode is ForwardMode.DECODE)
    monkeypatch.setattr(NullStep, "replayed", decoding)
    core = make_core()
    core._graph = True
    core.add(generate("a", [1, 2], SamplingParams(max_new_tokens=45)))
    finish(core)
    totals = core.stats().totals
    assert totals["graph_replays"] == totals["decode_steps"] == 44
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition("graph: ")[2][:4] for line in lines if "graph: " in line] == ["Fals", "True"]
    assert "graph_replays" not in make_core().stats().totals


def test_preparation_records_its_parts_and_its_measurements(null_config):
    seen = []
    prepared = prepare(null_config(), lambda part, done, total: seen.append(part))
    assert set(prepared.started_s) == {"open", "device", "weights", "memory", "pool", "warm-up"}
    assert list(dict.fromkeys(seen)) == list(prepared.started_s)
    assert prepared.plan.settings["max_total_tokens"].source is SettingSource.MEASURED
    assert prepared.settings.num_slots == prepared.plan.value("max_total_tokens")
    assert any("made up" in note for note in prepared.plan.notes)
    assert prepared.plan.memory
    prepared.close()


def test_a_stated_pool_keeps_its_source(null_config):
    plan = prepare(null_config(max_total_tokens=640)).plan
    assert plan.settings["max_total_tokens"].source is SettingSource.FLAG
    assert plan.value("max_total_tokens") == 640


def test_settings_reach_the_scheduler(null_config):
    config = null_config(
        max_total_tokens=640,
        page_size=8,
        schedule_policy="lpm",
        radix_eviction_policy="lfu",
        max_queued_requests=9,
        max_running_requests=5,
        chunked_prefill_size=64,
        max_prefill_tokens=512,
        schedule_conservativeness=0.5,
        prefill_decode_interval=2,
        priority_scheduling_preemption_threshold=3,
        enable_priority_scheduling=True,
        allow_auto_truncate=True,
        context_length=300,
        random_seed=11,
    )
    settings = scheduler_settings(resolve_plan(config), 1)
    for group in (config.cache, config.scheduler):
        for name in group.__dataclass_fields__:
            if hasattr(settings, name):
                assert getattr(settings, name) == getattr(group, name), name
    assert (settings.num_slots, settings.page_size, settings.context_length) == (640, 8, 300)
    assert replace(settings, random_seed=11) == settings


def test_a_draw_of_the_seed_is_in_the_plan(null_config):
    seeds = {resolve_plan(null_config(random_seed=None)).value("random_seed") for _ in range(4)}
    assert len(seeds) > 1


def test_a_plan_that_contradicts_itself_is_refused(null_config):
    with pytest.raises(ConfigError, match="--max-total-tokens must be at least"):
        prepare(null_config(max_total_tokens=2))


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, (1,)), (2, (1, 2)), (16, (1, 2, 4, 8, 16)), (40, (1, 2, 4, 8, 16, 32, 40))]
)
def test_decode_buckets(rows, expected):
    assert decode_buckets(rows, captured=True) == expected
    assert decode_buckets(rows, captured=False) == tuple(sorted({1, rows}))
