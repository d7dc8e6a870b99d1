from __future__ import annotations

import pytest
from scheduler_harness import Harness, LogprobParams, PairStop, SamplingParams, request, settings

from cardan.errors import ConfigError, PromptTooLongError, QueueFullError, RequestError
from cardan.scheduler import Scheduler
from cardan.types import FinishKind


def test_the_longest_prompt_that_is_admitted_runs_and_one_more_token_is_refused_with_both_numbers() -> None:
    for page in (1, 16):
        harness = Harness(settings(num_slots=96, page_size=page, context_length=500))
        longest = harness.settings.max_input_tokens
        harness.add(request("fits", longest, max_new=1000))
        harness.run()
        harness.check_outputs()
        with pytest.raises(PromptTooLongError, match=rf"has {longest + 1} tokens, but at most {longest} fit") as caught:
            harness.scheduler.add(request("too-long", longest + 1))
        assert caught.value.code == "context_length_exceeded"


def test_the_formula_of_the_longest_prompt() -> None:
    assert settings(num_slots=256, context_length=100).max_input_tokens == 94
    assert settings(num_slots=50, context_length=100).max_input_tokens == 44


def test_a_long_prompt_is_cut_only_where_that_was_asked_for() -> None:
    harness = Harness(settings(allow_auto_truncate=True, context_length=40))
    harness.add(request("long", 100, max_new=3))
    harness.run()
    end = harness.ends["long"]
    assert (end.num_prompt_tokens, end.truncated_from) == (34, 100)
    harness.check_outputs()


def test_output_is_clamped_to_the_pool_and_to_the_context_and_the_answer_says_so() -> None:
    harness = Harness(settings(num_slots=64, context_length=500))
    harness.add(request("pool", 20, max_new=1000), request("fits", 20, max_new=5))
    harness.run()
    assert harness.ends["pool"].max_new_tokens_clamped == 64 - 20 - 1 - 1
    assert len(harness.tokens["pool"]) == 42
    assert harness.ends["fits"].max_new_tokens_clamped is None
    context = Harness(settings(num_slots=400, context_length=50))
    context.add(request("context", 20, max_new=1000))
    context.run()
    assert len(context.tokens["context"]) == 30


def test_a_request_without_output_ends_with_its_prompt() -> None:
    harness = Harness(settings())
    harness.add(request("none", 5, max_new=0, logprobs=LogprobParams(prompt_start=0)))
    harness.run()
    harness.check_outputs()
    assert harness.ends["none"].finish_reason.kind is FinishKind.LENGTH
    assert len(harness.ends["none"].prompt_logprobs) == 5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (request("x", []), "The prompt is empty"),
        (request("x", [1, 97]), "between 0 and 96, got 97"),
        (request("x", [-1, 2]), "between 0 and 96, got -1"),
        (request("x", [1], max_new=-1), "max_new_tokens must be 0 or more, got -1"),
        (request("x", [1], params=SamplingParams(logit_bias={200: 1.0})), "logit_bias must name .* got 200"),
        (request("x", [1], params=SamplingParams(stop=("a",))), "must bring a stop checker"),
        (request("x", [1], logprobs=LogprobParams(prompt_start=2)), "prompt of 1 tokens, got position 2"),
    ],
)
def test_wrong_requests_are_refused_before_they_run(wrong: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Scheduler(settings()).add(wrong)  # type: ignore[arg-type]


def test_a_rid_may_be_used_again_only_after_its_request_ended() -> None:
    harness = Harness(settings())
    harness.add(request("a", max_new=1))
    with pytest.raises(RequestError, match="rid 'a' is open"):
        harness.scheduler.add(request("a"))
    harness.run()
    harness.scheduler.add(request("a"))


def test_the_queue_limit_refuses_newcomers_and_never_a_retracted_request() -> None:
    harness = Harness(settings(max_queued_requests=2, max_running_requests=1))
    harness.add(request("a"), request("b"))
    with pytest.raises(QueueFullError, match=r"2 requests are waiting .*--max-queued-requests") as caught:
        harness.scheduler.add(request("c"))
    assert caught.value.retry_after_s > 0
    harness.turn()
    harness.add(request("c"))
    running = next(iter(harness.scheduler._state.open.values()))
    harness.turn()
    harness.scheduler._state.retract(running, "pool full")
    assert [one.rid for one in harness.scheduler._state.waiting] == ["a", "b", "c"]
    harness.run()
    harness.check_outputs()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule_policy": "best"}, "--schedule-policy must be one of fcfs, .*, got 'best'"),
        ({"schedule_policy": "lpm", "disable_radix_cache": True}, "lpm orders by cached prefixes"),
        ({"schedule_policy": "dfs-weight", "disable_radix_cache": True}, "dfs-weight orders by cached prefixes"),
        ({"schedule_policy": "priority"}, "needs --enable-priority-scheduling"),
        ({"radix_eviction_policy": "best"}, "--radix-eviction-policy must be one of lru"),
        ({"max_running_requests": 0}, "--max-running-requests must be at least 1, got 0"),
        ({"page_size": 32, "chunked_prefill_size": 16}, "at least one page .32 tokens.*got 16"),
        ({"num_slots": 16, "page_size": 16}, "leave no room for a prompt"),
        ({"context_length": 6}, "leave no room for a prompt"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_start_up(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**changes)


def test_a_seed_is_kept_and_a_missing_one_comes_from_the_random_seed_and_the_arrival() -> None:
    def seeds(random_seed: int) -> list[int]:
        harness = Harness(settings(random_seed=random_seed))
        harness.add(request("a"), request("b"), request("c", params=SamplingParams(seed=-1, max_new_tokens=1)))
        return [one.seed for one in harness.requests.values()]

    first, again, other = seeds(0), seeds(0), seeds(1)
    assert first == again
    assert first[2] == 2**64 - 1
    assert len({first[0], first[1], other[0], other[1]}) == 4


def test_stop_strings_call_the_checker_and_token_stops_do_not_need_one() -> None:
    harness = Harness(settings())
    params = SamplingParams(max_new_tokens=60, stop=("x",))
    harness.add(request("pair", params=params, stop=PairStop(7)))
    harness.run()
    harness.check_outputs()
    assert harness.ends["pair"].finish_reason.matched == "pair"
