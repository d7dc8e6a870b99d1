"""The shared memory policy: what it never exceeds, and what its refusals say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cardan.errors import MemoryPlanError
from cardan.platform import Memory, MemoryRequest, SharedMemoryPolicy

MIB, GIB = 2**20, 2**30
POLICY = SharedMemoryPolicy()
REQUEST = MemoryRequest(
    memory=Memory(total=16 * GIB, free=10 * GIB, shared=True),
    weight_bytes=GIB,
    activation_bytes=200 * MIB,
    graph_bytes=0,
    bytes_per_slot=23_040,
    page_size=16,
    min_slots=64,
    useful_slots=10**9,
)

requests = st.builds(
    lambda memory, **rest: MemoryRequest(memory=memory, **rest),
    memory=st.builds(
        lambda total, share: Memory(total=total, free=int(total * share), shared=True),
        st.integers(1, 64 * GIB),
        st.floats(0, 1),
    ),
    weight_bytes=st.integers(0, 20 * GIB),
    activation_bytes=st.integers(0, 2 * GIB),
    graph_bytes=st.integers(0, GIB),
    bytes_per_slot=st.integers(1, 10**6),
    page_size=st.sampled_from([1, 16, 64]),
    min_slots=st.integers(1, 10_000),
    useful_slots=st.integers(1, 10**7),
    fraction=st.one_of(st.none(), st.floats(0.01, 0.99)),
    max_total_tokens=st.one_of(st.none(), st.integers(1, 10**6)),
)


@settings(max_examples=300, deadline=None)
@given(requests)
def test_a_plan_keeps_every_bound_or_is_refused(request: MemoryRequest) -> None:
    memory = request.memory
    assert memory.free is not None
    try:
        plan = POLICY.plan(request)
    except MemoryPlanError:
        return
    assert plan.num_slots >= request.min_slots
    assert plan.num_slots % request.page_size == 0
    assert plan.pool_bytes == (plan.num_slots + request.page_size) * request.bytes_per_slot
    left = memory.free - plan.pool_bytes - request.activation_bytes - request.graph_bytes
    assert left >= POLICY.head_room(memory)
    if request.max_total_tokens is not None:
        assert plan.num_slots == request.max_total_tokens // request.page_size * request.page_size
        return
    fraction = request.fraction or POLICY.fraction
    assert plan.pool_bytes + request.weight_bytes <= fraction * (memory.free + request.weight_bytes) + 1
    assert plan.num_slots < request.useful_slots + request.page_size


def test_the_sum_is_shown_line_by_line() -> None:
    plan = POLICY.plan(REQUEST)
    share = 11 * GIB // 2 - GIB
    assert plan.num_slots == (share - 16 * 23_040) // 23_040 // 16 * 16
    assert plan.lines[-1][:2] == ("KV pool", plan.pool_bytes)
    assert [what for what, _, _ in plan.lines[:4]] == ["weights", "free", "activations", "graphs"]


def test_a_fraction_from_the_user_counts() -> None:
    more = POLICY.plan(replace(REQUEST, fraction=0.7)).num_slots
    assert more > 1.4 * POLICY.plan(REQUEST).num_slots


def test_head_room_binds_where_the_share_would_not() -> None:
    request = replace(REQUEST, fraction=0.99)
    plan = POLICY.plan(request)
    assert plan.pool_bytes <= 10 * GIB - 200 * MIB - int(1.6 * GIB)
    assert plan.pool_bytes + 16 * 23_040 > 10 * GIB - 200 * MIB - int(1.6 * GIB) - MIB


def test_a_pool_never_grows_beyond_its_use() -> None:
    plan = POLICY.plan(replace(REQUEST, useful_slots=1000))
    assert plan.num_slots == 1008
    assert "rows x context length" in plan.lines[-1][2]


def test_what_fits_exactly_with_its_padding_page_is_planned() -> None:
    exact = replace(REQUEST, useful_slots=64, min_slots=64, weight_bytes=0, activation_bytes=0)
    needed = 80 * 23_040 + POLICY.head_room(Memory(total=4 * GIB, free=0))
    fits = replace(exact, memory=Memory(total=4 * GIB, free=needed), fraction=0.999)
    assert POLICY.plan(fits).num_slots == 64
    with pytest.raises(MemoryPlanError, match="would hold 48 tokens, but one request needs 64"):
        POLICY.plan(replace(fits, memory=Memory(total=4 * GIB, free=needed - 1)))


def test_a_budget_below_zero_is_refused_with_its_sum() -> None:
    with pytest.raises(MemoryPlanError, match=r"would hold 0 tokens.*weights 1,024 MiB; free 100 MiB.*Free memory"):
        POLICY.plan(replace(REQUEST, memory=Memory(total=16 * GIB, free=100 * MIB)))


def test_unknown_memory_needs_a_flag() -> None:
    unknown = replace(REQUEST, memory=Memory(total=None, free=None))
    with pytest.raises(MemoryPlanError, match=r"is unknown.*Pass --max-total-tokens N"):
        POLICY.plan(unknown)
    assert POLICY.plan(replace(unknown, max_total_tokens=1000)).num_slots == 992
    with pytest.raises(MemoryPlanError, match="one request needs 64"):
        POLICY.plan(replace(unknown, max_total_tokens=32))
    assert not POLICY.under_pressure(unknown.memory)


def test_a_pool_that_is_asked_for_and_does_not_fit_is_refused() -> None:
    with pytest.raises(MemoryPlanError, match=r"--max-total-tokens 1000000 needs 21,973 MiB.*Pass --max-total-tokens"):
        POLICY.plan(replace(REQUEST, max_total_tokens=10**6))
    assert POLICY.plan(replace(REQUEST, max_total_tokens=100)).num_slots == 96


@pytest.mark.parametrize(("free", "pressed"), [(900 * MIB, False), (700 * MIB, True), (0, True)])
def test_pressure_begins_at_half_of_the_head_room(free: int, pressed: bool) -> None:
    assert POLICY.under_pressure(Memory(total=16 * GIB, free=free)) is pressed
