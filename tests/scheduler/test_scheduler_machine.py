"""Any order of adding, aborting, planning and committing, with every invariant checked after each."""

from __future__ import annotations

from typing import Any

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_harness import EOS, Harness, LogprobParams, PairStop, SamplingParams, settings

from cardan.scheduler import Request

CONFIGS: list[dict[str, Any]] = [
    {"num_slots": 64},
    {"num_slots": 64, "enable_mixed_chunk": True, "schedule_conservativeness": 0.05},
    {"num_slots": 96, "page_size": 8, "schedule_conservativeness": 0.05},
    {"num_slots": 64, "disable_radix_cache": True, "schedule_conservativeness": 0.05},
    {"num_slots": 64, "enable_priority_scheduling": True, "prefill_decode_interval": 1},
    {"num_slots": 96, "page_size": 8, "enable_mixed_chunk": True, "enable_priority_scheduling": True},
]


class SchedulerMachine(RuleBasedStateMachine):
    """Up to two steps in flight, planned and committed in any legal order."""

    @initialize(config=st.sampled_from(CONFIGS), rows=st.integers(1, 4), chunk=st.sampled_from([8, 16, -1]))
    def start(self, config: dict[str, Any], rows: int, chunk: int) -> None:
        if config.get("enable_mixed_chunk"):
            chunk = 8
        self.harness = Harness(
            settings(max_running_requests=rows, chunked_prefill_size=chunk, **config), failure_rate=200
        )
        self.count = 0

    @rule(
        stem=st.integers(0, 40),
        tail=st.lists(st.integers(0, 3), min_size=1, max_size=6),
        max_new=st.integers(0, 20),
        kind=st.sampled_from(["plain", "plain", "pair", "logprobs", "penalty"]),
        grammar=st.sampled_from([False, False, False, True]),
        priority=st.sampled_from([0, 50]),
    )
    def add(self, stem: int, tail: list[int], max_new: int, kind: str, grammar: bool, priority: int) -> None:
        prompt = (list(range(stem)) + tail)[: self.harness.settings.max_input_tokens]
        one = Request(
            rid=f"r{self.count}",
            prompt_ids=prompt,
            params=SamplingParams(
                max_new_tokens=max_new,
                stop=("x",) if kind == "pair" else (),
                frequency_penalty=0.5 if kind == "penalty" else 0.0,
                min_new_tokens=2 if kind == "penalty" else 0,
            ),
            logprobs=LogprobParams(output=kind == "logprobs", prompt_start=0 if kind == "logprobs" else None),
            stop=PairStop(5) if kind == "pair" else None,
            priority=priority,
            eos_ids=frozenset({EOS}),
            needs_grammar=grammar,
        )
        self.count += 1
        self.harness.add(one)

    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        rids = list(self.harness.scheduler._state.open)
        if rids:
            assert self.harness.scheduler.abort(rids[which % len(rids)])
            self.harness.take(self.harness.scheduler.take_outputs())

    @rule()
    def grammars(self) -> None:
        for rid in list(self.harness.scheduler._state.waiting.grammar_waiting):
            self.harness.scheduler.grammar_ready(rid)

    @precondition(lambda self: len(self.harness.flying) < 2)
    @rule()
    def plan(self) -> None:
        self.harness.plan()

    @precondition(lambda self: self.harness.flying)
    @rule()
    def commit(self) -> None:
        self.harness.commit()

    @rule(overlap=st.booleans(), turns=st.integers(1, 10))
    def run_on(self, overlap: bool, turns: int) -> None:
        self.harness.overlap = overlap
        for _ in range(turns):
            if len(self.harness.flying) == 2:
                self.harness.commit()
            self.harness.turn()

    @rule()
    def flush(self) -> None:
        busy = self.harness.scheduler.has_requests or bool(self.harness.flying)
        assert self.harness.scheduler.flush_cache() is not busy

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "harness"):
            self.harness.scheduler.check_invariants()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.grammars()
            while self.harness.flying:
                self.harness.commit()
            self.harness.run()
            self.harness.check_outputs()
            self.harness.check_nothing_left()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = hypothesis_settings(max_examples=40, stateful_step_count=25, deadline=None)
