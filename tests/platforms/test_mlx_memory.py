"""Memory on MLX: no copy of the pool in either loop, no growth over many requests, and the policy under faked sizes."""

from __future__ import annotations

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from cardan.errors import MemoryPlanError  # noqa: E402
from cardan.platform import DeviceInfo, Memory, MemoryRequest  # noqa: E402
from cardan.types import KVLayout, LayerKV  # noqa: E402
from cardan_mlx import attention_plan  # noqa: E402
from cardan_mlx.attention import MlxAttention  # noqa: E402
from cardan_mlx.device import MlxDevice  # noqa: E402
from cardan_mlx.kv_pool import TAIL_STEPS  # noqa: E402
from cardan_mlx.memory import GIB, MIB, MlxMemoryPolicy, cache_limit, device_memory  # noqa: E402

LAYERS = 4
NUM_SLOTS = 16384
ROWS = 2
INFO = DeviceInfo(index=0, name="test")


class Loop:
    """Decode steps over a pool of 128 MiB, as a runner describes them; steps chain on each other's results."""

    def __init__(self, rows=ROWS):
        self.device = MlxDevice(INFO)
        self.layers = tuple(
            LayerKV(index=i, q_heads=4, kv_heads=4, k_dim=64, v_dim=64, scale=0.125) for i in range(LAYERS)
        )
        layout = KVLayout(layers=self.layers, page_size=1, dtype="float32")
        self.pool = self.device.allocate_kv(layout, NUM_SLOTS, rows + 1, 512)
        self.backend = MlxAttention(self.pool)
        self.rows, self.length, self.next_slot = rows, 0, 1
        self.x = mx.zeros((rows, 4, 64))
        mx.eval(self.x)

    def launch(self, tokens=1):
        from cardan.platform import AttentionMeta
        from cardan.types import ForwardMode

        count = self.rows * tokens
        slots = np.arange(self.next_slot, self.next_slot + count, dtype=np.int32)
        self.next_slot += count
        self.pool.tables[0, 1 : self.rows + 1, self.length : self.length + tokens] = slots.reshape(self.rows, tokens)
        self.length += tokens
        meta = AttentionMeta(
            mode=ForwardMode.DECODE if tokens == 1 else ForwardMode.EXTEND,
            query_starts=np.arange(0, count + 1, tokens, dtype=np.int32),
            seq_lens=np.full(self.rows, self.length, np.int32),
            row_ids=np.arange(1, self.rows + 1, dtype=np.int32),
            positions=np.zeros(count, np.int32),
            out_slots=slots[None],
        )
        with self.device.scope():
            plan = self.backend.plan(meta)
            x = mx.broadcast_to(self.x[:1], (count, 4, 64)) if tokens > 1 else self.x
            for layer in self.layers:
                x = self.backend.forward(x, x, x + 0.1, layer, plan).reshape(count, 4, 64)
            self.x = x[:: max(tokens, 1)]
            self.device.submit((self.x,))
            return self.device.fetch((self.x[:, 0, :1],))


def decode(loop, steps, overlap):
    """Run decode steps, one or two in flight."""
    before = None
    for _ in range(steps):
        fetch = loop.launch()
        if overlap:
            if before is not None:
                before.wait()
            before = fetch
        else:
            fetch.wait()
    if before is not None:
        before.wait()


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_no_step_copies_the_pool(overlap):
    loop = Loop()
    loop.launch(tokens=16).wait()
    decode(loop, 2, overlap)
    pool_bytes = sum(leaf.nbytes for leaf in (*loop.pool.keys, *loop.pool.values))
    assert pool_bytes == 128 * MIB
    others = mx.get_active_memory() - loop.pool.num_bytes
    mx.clear_cache()
    mx.reset_peak_memory()
    decode(loop, 3 * TAIL_STEPS, overlap)
    loop.launch(tokens=16).wait()
    decode(loop, 5, overlap)
    assert mx.get_peak_memory() - others < 1.05 * pool_bytes


def test_a_prefill_while_a_step_is_in_flight_copies_no_pool():
    loop = Loop(rows=1)
    loop.launch(tokens=16).wait()
    others = mx.get_active_memory() - loop.pool.num_bytes
    mx.reset_peak_memory()
    for _ in range(4):
        first, second = loop.launch(), loop.launch(tokens=16)
        first.wait()
        second.wait()
    assert mx.get_peak_memory() - others < 1.05 * 128 * MIB


def test_scores_of_long_prompts_stay_within_their_bound():
    device = MlxDevice(INFO)
    layer = LayerKV(index=0, q_heads=32, kv_heads=8, k_dim=16, v_dim=16, scale=0.25)
    pool = device.allocate_kv(KVLayout(layers=(layer,), page_size=1, dtype="float32"), 4097, 2, 4096)
    pool.tables[0, 1] = np.arange(1, 4097)
    from cardan.platform import AttentionMeta
    from cardan.types import ForwardMode

    meta = AttentionMeta(
        mode=ForwardMode.EXTEND,
        query_starts=np.array([0, 1024], np.int32),
        seq_lens=np.array([4096], np.int32),
        row_ids=np.array([1], np.int32),
        positions=np.arange(3072, 4096, dtype=np.int32),
        out_slots=np.arange(3073, 4097, dtype=np.int32)[None],
    )
    q, k = mx.zeros((1024, 32, 16)), mx.zeros((1024, 8, 16))
    mx.eval(q, k)
    backend = MlxAttention(pool)
    whole = 4 * 32 * 1024 * 4096
    peak = device.measured_peak(lambda: mx.eval(backend.forward(q, k, k, layer, backend.plan(meta))))
    gathered = 2 * 2 * 4096 * 8 * 16 * 4
    results = 2 * 4 * 1024 * 32 * 16
    assert peak < 4 * attention_plan.SCORE_BYTES + gathered + results < whole / 4


def test_memory_is_flat_over_many_requests():
    loop = Loop(rows=4)
    sizes = []
    for _ in range(40):
        loop.length, loop.next_slot = 0, 1
        loop.launch(tokens=8).wait()
        decode(loop, 20, overlap=True)
        sizes.append(mx.get_active_memory() + mx.get_cache_memory())
    assert max(sizes[20:]) <= max(sizes[:20]) + MIB


def test_what_is_kept_for_reuse_is_bounded():
    assert cache_limit(None) == cache_limit(1 * GIB) == 64 * MIB
    assert cache_limit(16 * GIB) == 512 * MIB
    assert cache_limit(512 * GIB) == 1024 * MIB
    device = MlxDevice(INFO, cache_limit_mib=3)
    for _ in range(20):
        mx.eval(mx.zeros((2 * MIB,)) + 1)
    assert mx.get_cache_memory() <= 3 * MIB
    device.close()
    assert mx.get_cache_memory() == 0


@pytest.mark.parametrize(
    ("host", "recommended", "active", "want"),
    [
        ((16, 9), None, 1, (16, 9)),
        ((16, 9), 12, 1, (12, 9)),
        ((16, 14), 12, 1, (12, 11)),
        ((16, 14), 12, 13, (12, 0)),
        ((None, None), 12, 1, (None, None)),
    ],
)
def test_the_working_set_bounds_what_is_free(host, recommended, active, want):
    memory = device_memory(
        Memory(total=host[0] and host[0] * GIB, free=host[1] and host[1] * GIB, shared=True),
        recommended and recommended * GIB,
        active * GIB,
    )
    assert (memory.total, memory.free) == tuple(size and size * GIB for size in want)
    assert memory.shared


def request(free, **changes):
    fields = {
        "memory": Memory(total=16 * GIB, free=free, shared=True),
        "weight_bytes": GIB,
        "activation_bytes": 100 * MIB,
        "graph_bytes": 0,
        "bytes_per_slot": 64 * 1024,
        "page_size": 16,
        "min_slots": 16,
        "useful_slots": 1 << 30,
    }
    return MemoryRequest(**{**fields, **changes})


@pytest.mark.parametrize("free", [4 * GIB, 6 * GIB, 9 * GIB, 15 * GIB])
def test_pool_tail_and_kept_buffers_leave_the_head_room(free):
    policy = MlxMemoryPolicy(kept=512 * MIB)
    plan = policy.plan(request(free))
    assert plan.num_slots > 0
    taken = plan.pool_bytes * 1.024 + 100 * MIB + 512 * MIB
    assert free - taken >= policy.head_room(Memory(total=16 * GIB, free=free))
    assert any("the pool's tail" in why and "512 MiB" in why for _, _, why in plan.lines)


@pytest.mark.parametrize("free", [0, 100 * MIB, 2 * GIB])
def test_there_is_no_least_pool(free):
    with pytest.raises(MemoryPlanError, match=r"The KV pool would hold 0 tokens, but one request needs 16"):
        MlxMemoryPolicy(kept=512 * MIB).plan(request(free))


def test_unknown_memory_is_an_error_that_names_the_flag():
    with pytest.raises(MemoryPlanError, match=r"free memory of the device is unknown.*Pass --max-total-tokens"):
        MlxMemoryPolicy(kept=MIB).plan(request(None))


def test_the_measured_peak_is_what_a_step_takes():
    device = MlxDevice(INFO)
    peak = device.measured_peak(lambda: mx.eval(mx.zeros((4 * MIB,)) + 1))
    assert 16 * MIB <= peak <= 40 * MIB
    assert device.activation_peak(lambda: None) is None
