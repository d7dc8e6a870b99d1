"""Attention of a row beside others: the same bits where that was asked for, whatever the others are."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from emulated_gpu import PLATFORMS, emulated  # noqa: E402

from cardan.platform import AttentionMeta  # noqa: E402
from cardan.testing.conformance.attention_checks import make_layer  # noqa: E402
from cardan.types import ForwardMode, KVLayout  # noqa: E402
from cardan_kernels.attention.splits import FIXED_TOKENS  # noqa: E402
from cardan_torch.gpu import triton_attention  # noqa: E402

LAYER = make_layer(q_heads=2, kv_heads=1)
CONTEXT = 1024


def attended(device, *lengths):
    """Decode over rows of these lengths, of which the first always has the same keys, values and query."""
    with device.scope():
        return _attended(device, np.array(lengths, np.int32))


def _attended(device, seq_lens):
    layout = KVLayout(layers=(LAYER,), page_size=1, dtype="float32")
    pool = device.allocate_kv(layout, 2 * CONTEXT, 4, CONTEXT)
    rng = np.random.default_rng(0)
    tensors = [torch.from_numpy(rng.normal(size=(2 * CONTEXT, 1, 16)).astype(np.float32)) for _ in range(2)]
    pool.keys[0].copy_(tensors[0])
    pool.values[0].copy_(tensors[1])
    pool.tables[0, :2] = torch.arange(2 * CONTEXT, dtype=torch.int32).view(2, CONTEXT)
    rows = len(seq_lens)
    slots = seq_lens - 1 + np.arange(rows, dtype=np.int32) * CONTEXT
    meta = AttentionMeta(
        mode=ForwardMode.DECODE,
        query_starts=np.arange(rows + 1, dtype=np.int32),
        seq_lens=seq_lens,
        row_ids=np.arange(rows, dtype=np.int32),
        positions=seq_lens - 1,
        out_slots=slots[None].astype(np.int32),
    )
    q = torch.from_numpy(rng.normal(size=(2, 2, 16)).astype(np.float32))[:rows]
    k, v = (x[torch.from_numpy(slots).long()] for x in tensors)
    backend = device.attention("triton", pool, layout, "float32")
    return backend.forward(q, k, v, LAYER, backend.plan(meta))[0]


def opened(name, invariant):
    platform = emulated(name)
    options = {"device": "emulated", "batch_invariant_attention": invariant}
    return platform.open(platform.devices()[0], options)


def test_steps_that_are_captured_share_the_memory_of_their_parts(monkeypatch):
    device = opened("cuda", True)
    taken = []

    def decode(q, kv, rows, scoring, split, out):
        taken.append((split.scratch.numel(), split.scratch.data_ptr()))

    monkeypatch.setattr(triton_attention.attention, "decode", decode)
    with device.scope():
        layout = KVLayout(layers=(LAYER,), page_size=1, dtype="float32")
        pool = device.allocate_kv(layout, 2 * CONTEXT, 5, CONTEXT)
        backend = device.attention("triton", pool, layout, "float32")
        plans = [backend.fixed_plan(rows) for rows in (4, 2, 1)]
        for plan in plans:
            rows = plan.arrays.num_rows
            backend.forward(torch.zeros(rows, 2, 16), *(torch.zeros(rows, 1, 16) for _ in "kv"), LAYER, plan)
    sizes, places = zip(*taken, strict=True)
    assert sizes == tuple(rows * 2 * (CONTEXT // FIXED_TOKENS) * (16 + 1) for rows in (4, 2, 1))
    assert len(set(places)) == 1


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_row_has_the_same_bits_alone_and_beside_a_longer_one(name):
    device = opened(name, True)
    alone = attended(device, 700)
    assert torch.equal(attended(device, 700, 1000), alone)
    free = opened(name, False)
    apart, beside = attended(free, 700), attended(free, 700, 1000)
    assert not torch.equal(apart, beside), "the rows are split alike, so that this test shows nothing"
    assert torch.allclose(apart, alone, atol=1e-5)
    assert torch.allclose(beside, alone, atol=1e-5)
