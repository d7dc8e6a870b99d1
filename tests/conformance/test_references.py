"""What the suite holds platforms to, held to something else: torch, safetensors, and sums that are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cardan.ops import round_to
from cardan.ops.definitions import log_softmax
from cardan.platform import ActivationCodes, Requantized
from cardan.quantization import FORMATS, dequantize
from cardan.testing.conformance import TINY_CONFIGS, CheckError, NotApplicableError, Subject
from cardan.testing.conformance.attention_bound import attention_bound
from cardan.testing.conformance.attention_checks import make_layer
from cardan.testing.conformance.engine_run import Answer
from cardan.testing.conformance.linear_checks import (
    activation_bound,
    half_steps,
    make_view,
    result_bound,
    row_bound,
    weight_bound,
)
from cardan.testing.conformance.parity import hold_alike
from cardan.testing.conformance.sampler_reference import Knobs, adjust, choose
from cardan.testing.conformance.tiny_checkpoint import TinyCheckpoint, write_safetensors
from cardan.testing.null_platform import platform as null_platform
from cardan.testing.reference_attention import attend, seen


def test_dense_attention_is_torchs() -> None:
    rng = np.random.default_rng(0)
    layer = make_layer(window=5)
    q, k, v = (rng.normal(size=(9, heads, 16)) for heads in (6, 2, 2))
    query, key, value = (torch.from_numpy(x).transpose(0, 1) for x in (q, np.repeat(k, 3, 1), np.repeat(v, 3, 1)))
    back = torch.arange(9)[:, None] - torch.arange(9)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=(back >= 0) & (back < 5), scale=layer.scale
    )
    want = out.transpose(0, 1).reshape(9, -1).numpy()
    assert np.abs(attend(q, k, v, layer).out - want).max() < 1e-12
    assert np.abs(attend(q[6:], k, v, layer).out - want[6:]).max() < 1e-12


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", [{}, {"softcap": 2.0}, {"window": 5}, {"k_dim": 64, "scale": 0.125}])
def test_the_bound_on_attention_holds_for_torch_and_sees_a_key_too_few(dtype: str, changes: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    layer = make_layer(**changes)
    q, k, v = (
        round_to(rng.normal(size=(40, heads, dim)), dtype)
        for heads, dim in ((6, layer.k_dim), (2, layer.k_dim), (2, layer.v_dim))
    )
    exact = attend(q, k, v, layer)
    allowed = attention_bound(q, k, v, layer, exact, dtype)
    kind = getattr(torch, dtype)
    query, key, value = (torch.from_numpy(x).to(kind) for x in (q, np.repeat(k, 3, 1), np.repeat(v, 3, 1)))
    scores = (torch.einsum("qhd,khd->hqk", query.float(), key.float()) * layer.scale).to(kind).float()
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    scores = scores.masked_fill(~torch.from_numpy(seen(layer, 40, 40)), -torch.inf)
    out = torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1).to(kind).float(), value.float()).to(kind)
    excess = np.abs(out.reshape(40, -1).double().numpy() - exact.out) / allowed
    assert 0.01 < excess.max() <= 1
    short = attend(q[1:], np.delete(k, 0, 0), np.delete(v, 0, 0), layer).out
    assert (np.abs(short - exact.out[1:]) / allowed[1:]).max() > 1


def test_a_sink_takes_its_share_of_the_softmax() -> None:
    layer = make_layer(q_heads=1, kv_heads=1, k_dim=1, v_dim=1, scale=1.0, sinks=True)
    one = np.zeros((1, 1, 1))
    # scores 0 and sink log(3): the value gets a share of 1 / (1 + 3)
    assert attend(one, one, one + 8.0, layer, np.log([3.0])).out == pytest.approx(2.0)


def test_penalties_by_hand() -> None:
    knobs = Knobs(frequency_penalty=0.5, presence_penalty=1.0, repetition_penalty=2.0, bias={3: 7.0})
    logits = np.array([4.0, -4.0, 2.0, 0.0])
    # token 0: prompt only; 1: twice in the output; 2: unseen; 3: biased
    assert adjust(logits, knobs, [0], [1, 1]).tolist() == [2.0, -8.0 - 1.0 - 1.0, 2.0, 7.0]


def test_filters_keep_what_they_say() -> None:
    scores = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    picked = {
        name: {choose(scores, Knobs(temperature=1.0, seed=seed, **{name: value}), 7) for seed in range(300)} - {None}
        for name, value in (("top_k", 2), ("top_p", 0.9), ("min_p", 0.2), ("temperature", 1.0))
        if name != "temperature"
    }
    assert picked == {"top_k": {0, 1}, "top_p": {0, 1, 2}, "min_p": {0, 1, 2}}


def test_draws_follow_the_shares() -> None:
    shares = np.array([0.5, 0.3, 0.15, 0.05])
    drawn = [choose(np.log(shares), Knobs(temperature=1.0, seed=seed), 7) for seed in range(4000)]
    counts = np.bincount([token for token in drawn if token is not None], minlength=4) / len(drawn)
    assert np.abs(counts - shares).max() < 0.025


def test_what_is_too_close_to_call_is_not_called() -> None:
    assert choose(np.array([1.0, 1.0 + 1e-6, 0.0]), Knobs(), 0) is None
    assert choose(np.array([1.0, 1.0 + 2e-5, 0.0]), Knobs(), 0) == 1, "the promise is 1e-5"
    assert choose(np.array([160.0, 160.0 + 2e-5, 0.0]), Knobs(), 0) is None, "float32 is coarser there"
    assert choose(np.array([1.0, 1.5, 0.0]), Knobs(), 0, off=0.3) is None
    assert choose(np.array([1.0, 1.5, 0.0]), Knobs(), 0, off=0.2) == 1
    by_half = Knobs(temperature=0.5, top_p=0.8, seed=5)
    shares = np.log([0.5, 0.2999, 0.2001]) / 2
    assert choose(shares, by_half, 0, off=1e-3) is None, "twice as far off over half the temperature"
    assert choose(shares, by_half, 0) is not None
    assert choose(np.log([0.5, 0.3, 0.2]), Knobs(temperature=1.0, top_p=0.8), 0) is None
    assert log_softmax(np.array([[0.0, 0.0]])) == pytest.approx(np.log(0.5))


def test_our_safetensors_are_readable(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b.c": np.ones(5, np.float32)}
    write_safetensors(tmp_path / "x.safetensors", tensors)
    loaded = load_file(tmp_path / "x.safetensors")
    assert set(loaded) == set(tensors)
    assert all(np.array_equal(loaded[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM", "Qwen3ForCausalLM"])
def test_the_reference_model_is_transformers_but_for_rounding(architecture: str, dtype: str, tmp_path: Path) -> None:
    import transformers

    checkpoint = TinyCheckpoint(tmp_path / architecture, TINY_CONFIGS[architecture])
    model_class = getattr(transformers, architecture)
    kind = getattr(torch, dtype)
    model = model_class.from_pretrained(checkpoint.folder, dtype=kind, attn_implementation="eager").eval()
    ids = np.random.default_rng(1).integers(3, 97, 40).tolist()
    with torch.no_grad():
        want = model(input_ids=torch.tensor([ids])).logits[0].double().numpy()
    excess = np.abs(checkpoint.logits(ids) - want).max() / checkpoint.rounding(ids, dtype)
    assert 0.05 < excess <= 1


def test_rounding_is_that_of_the_type(tmp_path: Path) -> None:
    checkpoint = TinyCheckpoint(tmp_path / "llama", TINY_CONFIGS["LlamaForCausalLM"])
    ids = list(range(3, 43))
    wide, half, brain = (checkpoint.rounding(ids, dtype) for dtype in ("float32", "float16", "bfloat16"))
    assert wide < half / 500 < brain / 2000


def test_answers_without_a_model_are_held_to_those_of_the_same_prompt() -> None:
    with Subject(null_platform) as subject:
        hold_alike(subject, (1, 2), Answer(tokens=[5, 6]), "first")
        hold_alike(subject, (1, 3), Answer(tokens=[7]), "another prompt of the same name")
        hold_alike(subject, (1, 2), Answer(tokens=[5, 6, 8]), "longer")
        with pytest.raises(CheckError, match="late got other tokens than at first"):
            hold_alike(subject, (1, 2), Answer(tokens=[5, 6, 9]), "late")


def test_a_format_without_a_description_is_left_out() -> None:
    with pytest.raises(NotApplicableError, match="has no description of Q9_9 to compare with"):
        make_view("Q9_9", 1, 32, np.random.default_rng(0))


@pytest.mark.parametrize("fmt", [name for name, spec in FORMATS.items() if spec.quantized])
def test_drawn_blocks_are_finite_and_of_use(fmt: str) -> None:
    spec = FORMATS[fmt]
    values = dequantize(make_view(fmt, 6, 2 * spec.block_elements, np.random.default_rng(2)))
    assert values.shape == (6, 2 * spec.block_elements)
    assert np.isfinite(values).all()
    assert 1e-3 < np.abs(values).max() < 16


def test_the_bound_on_a_weight_holds_in_bfloat16_and_barely() -> None:
    view = make_view("Q4_1", 64, 256, np.random.default_rng(3))
    blocks = np.frombuffer(view.data, np.uint8).reshape(-1, 20)
    scale, offset = (torch.from_numpy(blocks[:, at : at + 2].copy().view("<f2")).bfloat16() for at in (0, 2))
    codes = torch.from_numpy(np.concatenate((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), axis=1)).bfloat16()
    narrow = (codes * scale + offset).double().numpy().reshape(64, 256)
    exact = dequantize(view).astype(np.float64)
    excess = np.abs(narrow - exact) / weight_bound(exact, "Q4_1", "bfloat16")
    assert 0.2 < excess.max() <= 1
    dense = torch.from_numpy(exact).bfloat16().double().numpy()
    assert 0.9 < (np.abs(dense - exact) / np.maximum(weight_bound(exact, "F32", "bfloat16"), 1e-30)).max() <= 1


def test_values_that_a_type_holds_may_not_move() -> None:
    weight = np.ones((2, 3))
    for fmt, dtype in (("BF16", "bfloat16"), ("BF16", "float32"), ("F16", "float16"), ("F32", "float32")):
        assert not weight_bound(weight, fmt, dtype).any()
    for fmt, dtype in (("F16", "bfloat16"), ("BF16", "float16"), ("F32", "float16")):
        assert weight_bound(weight, fmt, dtype).all()


def test_the_largest_weight_is_that_of_its_scale() -> None:
    """Q6_K's blocks of 256 have a scale for each 16."""
    weight = np.full((1, 512), 1e-3)
    weight[0, 0] = 1.0
    allowed = weight_bound(weight, "Q6_K", "bfloat16")[0]
    assert len(set(allowed[:16])) == 1
    assert allowed[0] > 100 * allowed[16]


def test_float32_rows_of_exact_formats_are_rounded_once() -> None:
    view = make_view("Q4_K", 8, 256, np.random.default_rng(6))
    exact = dequantize(view).astype(np.float64)
    wide = row_bound(exact, weight_bound(exact, "Q4_K", "float32"), "Q4_K", "float32")
    assert np.array_equal(wide, 2.0**-24 * np.abs(exact))
    assert np.array_equal(row_bound(exact, exact, "AFFINE4_32_F32", "float32"), exact), "scales of 24 bits do not fit"


@pytest.mark.parametrize(("bits", "group"), [(8, 128), (4, 32)])
def test_the_bound_on_requantized_weights_is_half_a_step(bits: int, group: int) -> None:
    weight = np.random.default_rng(4).normal(size=(8, 256))
    groups = weight.reshape(8, -1, group)
    steps = 2**bits - 1
    least, step = groups.min(axis=2, keepdims=True), np.ptp(groups, axis=2, keepdims=True) / steps
    moved = np.abs(np.rint((groups - least) / step) * step + least - groups).reshape(8, 256)
    half = half_steps(weight, Requantized(bits, group))
    assert 0.9 < (moved / half).max() <= 1 + 1e-9
    coarse = np.abs(np.rint((groups - least) / (2 * step)) * 2 * step + least - groups).reshape(8, 256)
    assert (coarse / half).max() > 1.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("columns", [1, 7, 70, 2048])
def test_the_bound_on_results_holds_for_torch(dtype: str, columns: int) -> None:
    rng = np.random.default_rng(columns)
    x, weight, bias = (round_to(rng.normal(size=shape), dtype) for shape in ((17, columns), (64, columns), (64,)))
    kind = getattr(torch, dtype)
    got = torch.nn.functional.linear(*(torch.from_numpy(part).to(kind) for part in (x, weight, bias))).double().numpy()
    allowed = result_bound(x, weight, bias, np.zeros_like(weight), dtype)
    assert np.all(np.abs(got - (x @ weight.T + bias)) <= allowed)
    if columns == 2048:
        for dropped in (1, 4):
            short = x[:, :-dropped] @ weight[:, :-dropped].T + bias
            assert np.any(np.abs(short - (x @ weight.T + bias)) > allowed)


def test_the_bound_on_quantized_activations_is_half_a_step() -> None:
    x = np.random.default_rng(5).normal(size=(4, 96))
    groups = x.reshape(4, 3, 32)
    step = np.abs(groups).max(axis=2, keepdims=True) / 127
    moved = np.abs(np.rint(groups / step) * step - groups).reshape(4, 96)
    assert 0.9 < (moved / activation_bound(x, ActivationCodes(127, 32))).max() <= 1
    assert (moved / activation_bound(x, ActivationCodes(255, 32))).max() > 1.5
