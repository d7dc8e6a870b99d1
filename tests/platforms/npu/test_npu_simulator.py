"""The simulator of torch_npu refuses what the documentation refuses, and computes what it says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

PAGE = 128


@pytest.fixture(scope="module")
def t(torch_npu):
    """torch, the simulator, and makers of tensors on it."""
    import torch

    def on(array: Any, dtype: Any = None) -> Any:
        return torch.from_numpy(np.asarray(array)).to("npu", dtype)

    def floats(*shape: int, dtype: Any = torch.float16) -> Any:
        return on(np.random.default_rng(3).normal(size=shape).astype(np.float32), dtype)

    return SimpleNamespace(torch=torch, npu=torch_npu, on=on, floats=floats)


def attention(t, **changes: Any) -> Any:
    """A step of two rows, 3 and 1 queries over 130 and 5 keys, with some of it changed."""
    dim, page = changes.pop("dim", 16), changes.pop("page", PAGE)
    dtype = changes.pop("dtype", t.torch.float16)
    query = t.floats(4, 4, dim, dtype=dtype)
    caches = [t.floats(4, page, 2 * dim, dtype=dtype) for _ in range(2)]
    mask = t.on(np.triu(np.ones((2048, 2048), bool), 1))
    given = {
        "atten_mask": mask,
        "actual_seq_lengths": [3, 4],
        "actual_seq_lengths_kv": [130, 5],
        "block_table": t.on(np.array([[2, 1], [3, 0]], np.int32)),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": 0.25,
        "input_layout": "TND",
        "sparse_mode": 3,
        "block_size": page,
    }
    given.update(changes)
    return t.npu.npu_fused_infer_attention_score(query, *caches, **given)[0]


def test_it_attends_causally_over_pages(t):
    out = attention(t).cpu().float().numpy()
    query = t.floats(4, 4, 16).cpu().double().numpy()
    cache = t.floats(4, PAGE, 32).cpu().double().numpy()
    keys = np.concatenate((cache[2], cache[1]))[:130].reshape(130, 2, 16)
    scores = query[1, 3] @ keys[:129, 1].T * 0.25
    weights = np.exp(scores - scores.max())
    want = weights @ keys[:129, 1] / weights.sum()
    np.testing.assert_allclose(out[1, 3], want, atol=2e-3)


MISUSES = {
    "a layout that the call lacks": ({"input_layout": "SBH"}, "input_layout"),
    "pages too large for TND": ({"page": 256}, "at most 128"),
    "pages of 64 for rows of several queries": ({"page": 64, "actual_seq_lengths_kv": [120, 5]}, "multiple of 128"),
    "pages that are not aligned": ({"page": 72}, "multiple of 16"),
    "rows of more pages than the cache": (
        {"block_table": [[2, 1, 0], [3, 0, 1]], "actual_seq_lengths_kv": [300, 200]},
        "as many blocks as all rows together, 5, got 4",
    ),
    "less precision where heads share keys": ({"inner_precise": 1}, "inner_precise must be 0 in layout TND"),
    "a band behind every key": (
        {"sparse_mode": 4, "pre_tokens": -2, "next_tokens": 9},
        "pre_tokens must not be below minus the queries",
    ),
    "a band before every key": (
        {"sparse_mode": 4, "pre_tokens": 9, "next_tokens": -6},
        "next_tokens must not be below minus the keys",
    ),
    "a block size of another cache": ({"block_size": 64}, "block_size must be"),
    "heads that are not aligned": ({"dim": 24}, "multiple of 16"),
    "heads too wide": ({"dim": 512}, "up to 256"),
    "float32": ({"dtype": "float32"}, "float16, bfloat16"),
    "a mask of the scores' shape": ({"atten_mask": (4, 130)}, "2048"),
    "no mask in a mode that needs one": ({"atten_mask": None}, "needs an atten_mask"),
    "a mode that TND lacks": ({"sparse_mode": 2}, "sparse_mode"),
    "as many queries as keys in mode 3": ({"actual_seq_lengths_kv": [3, 5]}, "less queries than keys"),
    "lengths that do not add up": ({"actual_seq_lengths": [3, 1]}, "cumulative"),
    "no lengths": ({"actual_seq_lengths_kv": None}, "actual_seq_lengths"),
    "a table of int64": ({"block_table": "int64"}, "int32"),
    "a table too narrow": ({"actual_seq_lengths_kv": [300, 5]}, "columns"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_attention_is_refused(t, misuse):
    changes, said = MISUSES[misuse]
    changes = dict(changes)
    if changes.get("dtype") == "float32":
        changes["dtype"] = t.torch.float32
    if changes.get("atten_mask") is not None:
        changes["atten_mask"] = t.on(np.zeros(changes["atten_mask"], bool))
    if changes.get("block_table") == "int64":
        changes["block_table"] = t.on(np.array([[2, 1], [3, 0]]))
    if isinstance(changes.get("block_table"), list):
        changes["block_table"] = t.on(np.array(changes["block_table"], np.int32))
    with pytest.raises(RuntimeError, match=said):
        attention(t, **changes)


def test_a_mask_that_is_no_triangle_is_refused(t):
    with pytest.raises(RuntimeError, match="lower triangle"):
        attention(t, atten_mask=t.on(np.zeros((2048, 2048), bool)))


def test_pages_of_64_are_for_rows_of_one_query(t):
    table = t.on(np.array([[2, 1], [3, 0]], np.int32))
    cache = t.floats(4, 64, 32)
    attend = t.npu.npu_fused_infer_attention_score
    given = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "TND", "block_size": 64, "block_table": table}
    one = attend(t.floats(2, 4, 16), cache, cache, actual_seq_lengths=[1, 2], actual_seq_lengths_kv=[70, 5], **given)
    assert one[0].shape == (2, 4, 16)


def test_masks_lie_in_one_piece(t):
    across = t.on(np.tril(np.ones((2048, 2048), bool), -1)).t()
    with pytest.raises(RuntimeError, match="atten_mask must be contiguous"):
        attention(t, atten_mask=across)


def test_caches_of_more_elements_than_int32_counts_are_refused(t, monkeypatch):
    from torch_npu import _attention

    monkeypatch.setattr(_attention, "MOST_ELEMENTS", 4 * PAGE * 32)
    attention(t)
    monkeypatch.setattr(_attention, "MOST_ELEMENTS", 4 * PAGE * 32 - 1)
    with pytest.raises(RuntimeError, match="must have at most 16383 elements, got 16384"):
        attention(t)


def test_a_page_outside_of_the_cache_is_refused(t):
    with pytest.raises(RuntimeError, match="outside"):
        attention(t, block_table=t.on(np.array([[2, 9], [3, 0]], np.int32)))


def test_layers_are_refused(t):
    npu, torch = t.npu, t.torch
    x = t.floats(3, 8)
    with pytest.raises(RuntimeError, match="gamma must have the type"):
        npu.npu_rms_norm(x, t.floats(8, dtype=torch.float32))
    with pytest.raises(RuntimeError, match="last dimensions"):
        npu.npu_rms_norm(x, t.floats(7))
    with pytest.raises(RuntimeError, match="contiguous"):
        npu.npu_swiglu(t.floats(8, 4).t())
    with pytest.raises(RuntimeError, match="empty"):
        npu.npu_swiglu(x[:0])
    with pytest.raises(RuntimeError, match="even"):
        npu.npu_swiglu(t.floats(3, 5))
    with pytest.raises(RuntimeError, match="four dimensions"):
        npu.npu_rotary_mul(x, x, x)
    heads = t.floats(1, 1, 1000, 8)
    with pytest.raises(RuntimeError, match="below 1000"):
        npu.npu_rotary_mul(heads, heads[:, :, :1], heads[:, :, :1])
    for over in (1.5, float("nan")):
        row = t.on(np.full((1, 1, 1, 8), over, np.float16))
        with pytest.raises(RuntimeError, match=r"r1 and r2 must be within -1 \.\. 1"):
            npu.npu_rotary_mul(heads[:, :, :9], row, row)
    with pytest.raises(RuntimeError, match=r"indices must be in 0 \.\. 2"):
        npu.npu_scatter_nd_update_(x, t.on(np.array([[3]])), x[:1])
    with pytest.raises(RuntimeError, match="updates must be"):
        npu.npu_scatter_nd_update_(x, t.on(np.array([[1]])), x)


def test_products_are_refused(t):
    npu, torch = t.npu, t.torch
    x, codes = t.floats(3, 64), t.on(np.ones((64, 5), np.int8))
    scale = t.floats(5, dtype=torch.float32)
    rounded, steps = npu.npu_dynamic_quant(x)
    narrow, ones, most = scale.bfloat16(), t.on(np.ones((3, 64), np.int8)), t.on(np.full(5, 2**31 - 1, np.int32))
    with pytest.raises(RuntimeError, match="x must be float16, bfloat16"):
        npu.npu_dynamic_quant(t.floats(3, 64, dtype=torch.float32))
    with pytest.raises(RuntimeError, match="x1 must be int8"):
        npu.npu_quant_matmul(x, codes, scale, output_dtype=torch.float16)
    with pytest.raises(RuntimeError, match="scale"):
        npu.npu_quant_matmul(rounded, codes, scale.half(), pertoken_scale=steps, output_dtype=torch.float16)
    with pytest.raises(RuntimeError, match="without pertoken_scale go through npu_trans_quant_param"):
        npu.npu_quant_matmul(rounded, codes, scale, output_dtype=torch.float16)
    with pytest.raises(RuntimeError, match="bias must be int32, bfloat16, float32, got float16"):
        npu.npu_quant_matmul(rounded, codes, scale, bias=scale.half(), output_dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="bias must be int32, float32, got bfloat16"):
        npu.npu_quant_matmul(rounded, codes, scale, bias=narrow, pertoken_scale=steps, output_dtype=torch.float16)
    with pytest.raises(RuntimeError, match="bias must have one dimension, as long as x2's last, 5"):
        npu.npu_quant_matmul(rounded, codes, scale, bias=t.on(np.ones(4, np.int32)), output_dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="a sum of products, with its bias, must stay within 2147483647 of int32"):
        npu.npu_quant_matmul(ones, codes, scale, bias=most, output_dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="x1 and x2 must not be empty"):
        npu.npu_quant_matmul(ones[:0], codes, scale, output_dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="bias must be contiguous, one of"):
        npu.npu_weight_quant_batchmatmul(x, codes, t.floats(1, 5), bias=t.floats(4))
    with pytest.raises(RuntimeError, match="quant_scale is for int8 results"):
        npu.npu_weight_quant_batchmatmul(x, codes, t.floats(1, 5), quant_scale=scale)
    with pytest.raises(RuntimeError, match="antiquant_scale must have the type"):
        npu.npu_weight_quant_batchmatmul(x, codes, scale[None])
    with pytest.raises(RuntimeError, match="multiple of 32"):
        npu.npu_weight_quant_batchmatmul(x, codes, t.floats(1, 5), antiquant_group_size=64)
    with pytest.raises(RuntimeError, match=r"torch\.compile"):
        npu.npu_weight_quant_batchmatmul(x, npu.npu_format_cast(codes, 29), t.floats(1, 5))
    with pytest.raises(RuntimeError, match=r"-8 \.\. 7"):
        npu.npu_convert_weight_to_int4pack(t.on(np.full((2, 8), 8, np.int32)))


def test_steps_that_are_given_are_refused_where_they_do_not_fit(t):
    npu, torch = t.npu, t.torch
    x, step = t.floats(3, 64), t.on(np.array([0.5], np.float32))
    with pytest.raises(RuntimeError, match="scales must be float32, bfloat16"):
        npu.npu_quantize(x, step.half(), None, torch.qint8)
    with pytest.raises(RuntimeError, match="scales must have one dimension"):
        npu.npu_quantize(x, step[None], None, torch.qint8)
    with pytest.raises(RuntimeError, match="scales must have 1 or 64 elements"):
        npu.npu_quantize(x, t.on(np.ones(3, np.float32)), None, torch.qint8)
    with pytest.raises(RuntimeError, match="zero_points must be int8, uint8, int32, bfloat16"):
        npu.npu_quantize(x, step, step, torch.qint8)
    with pytest.raises(RuntimeError, match="dtype must be qint8, quint8 or int32"):
        npu.npu_quantize(x, step, None, torch.float16)
    codes = npu.npu_quantize(
        t.on(np.array([[-99.0, 0.6, 1.3]], np.float32)), step, t.on(np.array([3], np.int32)), torch.qint8
    )
    assert codes.cpu().tolist() == [[-128, 4, 6]]


def test_codes_of_four_bits_come_back(t):
    values = np.random.default_rng(5).integers(-8, 8, (6, 64)).astype(np.int32)
    packed = t.npu.npu_convert_weight_to_int4pack(t.on(values))
    x, scales = t.floats(3, 64), t.floats(2, 6)
    got = t.npu.npu_weight_quant_batchmatmul(x, packed.t(), scales, antiquant_group_size=32).cpu().float().numpy()
    wide = values.T * np.repeat(scales.cpu().float().numpy(), 32, axis=0)
    np.testing.assert_allclose(got, x.cpu().float().numpy() @ wide, rtol=5e-3, atol=0.15)


def test_devices_do_not_mix_and_float64_is_refused(t):
    x = t.floats(2, 2)
    with pytest.raises(RuntimeError, match="same device"):
        x + t.torch.ones(2, 2)
    with pytest.raises(RuntimeError, match="float64"):
        x.double()


def test_memory_is_counted(t):
    before = t.torch.npu.memory_allocated()
    x = t.floats(256, 128)
    view = x[:2]
    assert t.torch.npu.memory_allocated() - before == 256 * 128 * 2
    del x
    assert t.torch.npu.memory_allocated() > before
    del view
    assert t.torch.npu.memory_allocated() == before
    assert t.torch.npu.max_memory_allocated() >= before + 256 * 128 * 2
