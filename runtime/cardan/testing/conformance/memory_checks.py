"""The memory policy under made-up capacities: none, unknown, limited, shared, and many at random.

It knows no policy: whatever divides the memory must keep these invariants.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from cardan.errors import MemoryPlanError
from cardan.platform import Memory, MemoryPlan, MemoryRequest
from cardan.testing.conformance.check import Check, CheckError, expect
from cardan.testing.conformance.subject import Subject

MIB = 2**20
GIB = 2**30
SHARED_TOTAL = 64 * GIB
DRAWN = 200


def checks(subject: Subject) -> Iterator[Check]:
    """Checks of how memory is measured and divided."""
    for name, run in (
        ("measured-memory-makes-sense", _run_measured),
        ("no-memory-is-an-error-not-a-floor", _run_none),
        ("unknown-memory-is-an-error-that-names-the-flag", _run_unknown),
        ("pool-stays-within-the-budget", _run_random),
        ("stated-size-is-kept-or-refused", _run_stated),
        ("shared-memory-keeps-head-room", _run_shared),
        ("limited-memory-is-believed", _run_limited),
        ("more-memory-never-gives-less", _run_monotone),
        ("pressure-is-a-yes-or-no", _run_pressure),
    ):
        yield Check(part="memory", name=name, run=partial(run), needs_ops=False)


def _request(**changes: Any) -> MemoryRequest:
    fields: dict[str, Any] = {
        "memory": Memory(total=64 * GIB, free=48 * GIB, shared=True),
        "weight_bytes": 2 * GIB,
        "activation_bytes": GIB // 2,
        "graph_bytes": 64 * MIB,
        "bytes_per_slot": 65536,
        "page_size": 16,
        "min_slots": 32,
        "useful_slots": 1 << 22,
    }
    return MemoryRequest(**{**fields, **changes})


def _must_plan(subject: Subject, request: MemoryRequest, what: str) -> MemoryPlan:
    """The plan, where there is room for one."""
    try:
        return subject.device.plan_memory(request)
    except MemoryPlanError as error:
        raise CheckError(f"{what}: refused, though there is room: {error}") from error


def _plan(subject: Subject, request: MemoryRequest) -> MemoryPlan | None:
    """The plan, or None where the policy refuses."""
    try:
        return subject.device.plan_memory(request)
    except MemoryPlanError as error:
        expect(bool(str(error)), "MemoryPlanError has no message")
        return None


def _refusal(subject: Subject, request: MemoryRequest, what: str) -> str:
    try:
        plan = subject.device.plan_memory(request)
    except MemoryPlanError as error:
        return str(error)
    raise CheckError(
        f"{what}: a pool of {plan.num_slots} slots ({plan.pool_bytes} bytes) was planned, expected a MemoryPlanError"
    )


def _hold(request: MemoryRequest, plan: MemoryPlan) -> None:
    """The invariants of any plan over known memory."""
    free = request.memory.free
    page = request.page_size
    expect(plan.num_slots % page == 0, f"the pool has {plan.num_slots} slots, no multiple of the page of {page}")
    expect(
        plan.num_slots >= request.min_slots,
        f"the pool has {plan.num_slots} slots, but one request needs {request.min_slots}: refuse instead",
    )
    least = (plan.num_slots + page) * request.bytes_per_slot
    expect(plan.pool_bytes >= least, f"{plan.num_slots} slots and a padding page take {least}, not {plan.pool_bytes}")
    if free is not None:
        taken = plan.pool_bytes + request.activation_bytes + request.graph_bytes
        expect(
            taken <= free,
            f"pool, activations and graphs take {taken} bytes of {free} free: the pool exceeds its budget",
        )
    if request.max_total_tokens is None:
        most = -(-request.useful_slots // page) * page
        expect(plan.num_slots <= most, f"the pool has {plan.num_slots} slots, of which {most} could ever be used")


def _run_measured(subject: Subject) -> None:
    memory = subject.device.memory()
    expect(memory.total is None or memory.total > 0, f"total memory is {memory.total}")
    expect(memory.free is None or memory.free >= 0, f"free memory is {memory.free}")
    if memory.total is not None and memory.free is not None:
        expect(memory.free <= memory.total, f"{memory.free} bytes are free of {memory.total}")


def _run_none(subject: Subject) -> None:
    for free in (0, 1, MIB):
        request = _request(memory=Memory(total=4 * GIB, free=free, shared=True))
        _refusal(subject, request, f"{free} bytes are free")
    request = _request(memory=Memory(total=4 * GIB, free=GIB, shared=False), activation_bytes=2 * GIB)
    _refusal(subject, request, "activations exceed what is free")


def _run_unknown(subject: Subject) -> None:
    unknown = Memory(total=None, free=None)
    message = _refusal(subject, _request(memory=unknown), "memory is unknown")
    expect("--max-total-tokens" in message, f"the message does not name --max-total-tokens: {message}")
    plan = _must_plan(subject, _request(memory=unknown, max_total_tokens=4096), "--max-total-tokens, memory unknown")
    expect(plan.num_slots == 4096, f"--max-total-tokens 4096 gave {plan.num_slots} slots")


def _drawn(rng: np.random.Generator) -> MemoryRequest:
    def size(low: int, high: int) -> int:
        return int(2.0 ** rng.uniform(low, high))

    total = size(28, 40)
    page = int(rng.choice([1, 2, 16, 64, 256]))
    return _request(
        memory=Memory(total=total, free=int(total * rng.random()), shared=bool(rng.random() < 0.5)),
        weight_bytes=size(20, 38),
        activation_bytes=size(18, 33),
        graph_bytes=int(rng.choice([0, size(20, 30)])),
        bytes_per_slot=size(8, 20),
        page_size=page,
        min_slots=-(-max(7, page + 3) // page) * page,
        useful_slots=size(8, 24),
        fraction=None if rng.random() < 0.5 else float(rng.uniform(0.05, 0.95)),
    )


def _run_random(subject: Subject) -> None:
    rng = np.random.default_rng(5)
    planned = 0
    for _ in range(DRAWN):
        request = _drawn(rng)
        plan = _plan(subject, request)
        if plan is not None:
            planned += 1
            _hold(request, plan)
    expect(planned > DRAWN // 10, f"only {planned} of {DRAWN} capacities gave a pool at all")


def _run_stated(subject: Subject) -> None:
    request = _request(max_total_tokens=8192)
    plan = _must_plan(subject, request, "8,192 slots of 64 KiB in 48 GiB")
    expect(plan.num_slots == 8192, f"--max-total-tokens 8192 gave {plan.num_slots} slots")
    _hold(request, plan)
    message = _refusal(subject, _request(max_total_tokens=1 << 22), "4 million slots of 64 KiB in 48 GiB")
    expect("--max-total-tokens" in message, f"the message does not name --max-total-tokens: {message}")


def _run_shared(subject: Subject) -> None:
    request = _request(memory=Memory(total=8 * GIB, free=6 * GIB, shared=True), weight_bytes=GIB)
    plan = _must_plan(subject, request, "6 GiB free of 8 that are shared")
    _hold(request, plan)
    left = 6 * GIB - plan.pool_bytes - request.activation_bytes - request.graph_bytes
    expect(left >= 64 * MIB, f"of shared memory only {left} bytes stay free for other programs")


def _run_limited(subject: Subject) -> None:
    """A cgroup's limit comes as the total; what the machine has beside it must not matter."""
    limited = _request(
        memory=Memory(total=3 * GIB, free=2 * GIB, reserved_by_others=100 * GIB, shared=True),
        weight_bytes=GIB // 4,
        activation_bytes=64 * MIB,
    )
    _hold(limited, _must_plan(subject, limited, "2 GiB free under a limit of 3 GiB"))


def _run_monotone(subject: Subject) -> None:
    before = 0
    for free in (GIB, 2 * GIB, 4 * GIB, 8 * GIB, 16 * GIB, 32 * GIB, 60 * GIB):
        request = replace(_request(), memory=Memory(total=SHARED_TOTAL, free=free, shared=True))
        # a policy may leave a quarter of a shared memory to others; with more than that free there is a plan
        enough = free >= SHARED_TOTAL // 4
        plan = _must_plan(subject, request, f"{free} bytes free") if enough else _plan(subject, request)
        slots = 0 if plan is None else plan.num_slots
        expect(slots >= before, f"{free} bytes free give {slots} slots, less free memory gave {before}")
        before = slots


def _run_pressure(subject: Subject) -> None:
    answer = subject.device.under_pressure()
    expect(isinstance(answer, bool), f"under_pressure gave {answer!r}, expected True or False")
