"""What the suite holds platforms to, held to something else: torch, safetensors, and sums that are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cardan.ops import round_to
from cardan.platform import ActivationCodes, Requantized
from cardan.quantization import FORMATS, dequantize
from cardan.references.attention import attend, seen
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
from cardan.testing.conformance.tiny_checkpoint import TinyCheckpoint, write_safetensors
from cardan.testing.null_platform import platform as null_platform


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
