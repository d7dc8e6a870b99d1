"""Every attention and GEMM that a GPU platform claims is what a plan leads to, and is run: the table is printed.

One variant of each claim runs among the slow tests; every combination of them is for ``make kernels-grid``.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from emulated_gpu import PLATFORMS, emulated  # noqa: E402

from cardan.config import EngineConfig, ModelConfig, PlatformConfig  # noqa: E402
from cardan.platform import Feature, LinearSpec, ModelFacts, Support  # noqa: E402
from cardan.quantization import FORMATS  # noqa: E402
from cardan.testing.conformance import Subject, linear_checks  # noqa: E402
from cardan.testing.conformance.attention_bench import Row  # noqa: E402
from cardan.testing.conformance.attention_checks import make_layer, try_case  # noqa: E402
from cardan.testing.conformance.linear_checks import claiming, make_view  # noqa: E402
from cardan.types import ForwardMode, KVKind  # noqa: E402

HOW_MUCH = [
    pytest.param(False, id="each-claim", marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
    pytest.param(True, id="every-combination", marks=[pytest.mark.exhaustive, pytest.mark.timeout(1500)]),
]

KINDS = {
    "plain": ({}, None),
    "window": ({"window": 5, "kind": KVKind.SLIDING}, Feature.SLIDING_WINDOW),
    "softcap": ({"softcap": 2.0}, Feature.ATTENTION_SOFTCAP),
    "sinks": ({"sinks": True}, Feature.ATTENTION_SINKS),
}
"""Changes of a layer, with the claim that they are under."""

BATCHES = {
    "decode": (ForwardMode.DECODE, (Row(9, 1), Row(0, 1))),
    "prefill": (ForwardMode.EXTEND, (Row(3, 5), Row(0, 4))),
    "mixed": (ForwardMode.MIXED, (Row(3, 5), Row(8, 1))),
}
"""A mixed step runs both kernels, prefill's over the row of several tokens and decode's over the other."""

FEW_ROWS, MANY_ROWS = 1, 9
"""Rows that a coded linear takes by its matrix-vector kernel, and by its tiles."""


def facts(layer, fmt="BF16", dtype="bfloat16"):
    return ModelFacts(
        name="m", architecture="LlamaForCausalLM", family="llama", num_layers=1, hidden_size=64, intermediate_size=64,
        vocab_size=100, context_length=128, layers=(layer,), num_parameters=1, weight_bytes=1,
        weight_formats={fmt: 1}, native_dtype=dtype,
    )  # fmt: skip


@pytest.fixture(scope="module", params=PLATFORMS)
def subject(request):
    with Subject(emulated(request.param), quick=True, options=("device=emulated",)) as found:
        yield found


def config(subject, **platform):
    return EngineConfig(
        model=ModelConfig(model="m"),
        platform=PlatformConfig(platform=subject.platform.name, options=("device=emulated",), **platform),
    )


def claims(subject, *families):
    """Answers of these families that say yes."""
    return {
        str(feature)
        for feature, answer in subject.capabilities.features.items()
        if str(feature).partition(":")[0] in families and answer.support is not Support.UNSUPPORTED
    }


def show(capsys, subject, what, reached):
    """Print which variants ran for each claim."""
    lines = [f"\n{subject.platform.name}: {len(reached)} claims of {what} reached through the plan"]
    lines += [f"  {claim:<26} {', '.join(variants)}" for claim, variants in reached.items()]
    with capsys.disabled():
        sys.stdout.write("\n".join(lines) + "\n")


def planned_backend(subject, layer, backend):
    """Whether the plan for a model of such layers attends by a backend, in both phases."""
    plan = subject.plan(facts(layer), config(subject, attention_backend=backend))
    return all(plan.value(f"{phase}_attention_backend") == backend for phase in ("prefill", "decode"))


@pytest.mark.parametrize("whole", HOW_MUCH)
def test_every_attention_that_is_claimed(subject, whole, capsys):
    """Each backend over each kind of layer, in each kind of step, and over each type of keys and values."""
    reached = {}
    for backend in subject.capabilities.family("attention"):
        for kind, (changes, claim) in KINDS.items():
            layer = make_layer(**changes)
            assert planned_backend(subject, layer, backend)
            for batch in BATCHES if whole or kind == "plain" else ("mixed",):
                try_case(subject, backend, *BATCHES[batch], layer)
                reached.setdefault(claim or f"attention:{backend}", []).append(f"{backend} {batch}")
        for kv_dtype in subject.capabilities.family("kv_dtype"):
            plan = subject.plan(facts(make_layer()), config(subject, kv_cache_dtype=kv_dtype))
            assert plan.kv_cache_dtype == kv_dtype
            for batch in ("decode", "prefill") if whole else ("mixed",):
                try_case(subject, backend, *BATCHES[batch], make_layer(), kv_dtype=kv_dtype)
                reached.setdefault(f"kv_dtype:{kv_dtype}", []).append(f"{backend} {batch}")
    kinds = {str(claim) for _, claim in KINDS.values() if claim}
    assert set(map(str, reached)) == claims(subject, "attention", "kv_dtype") | kinds
    show(capsys, subject, "attention", reached)


@pytest.mark.parametrize("whole", HOW_MUCH)
def test_every_gemm_that_is_claimed(subject, whole, capsys, monkeypatch):
    """Each format of weights by the method that takes it, for one row and for many."""
    if not whole:
        monkeypatch.setattr(linear_checks, "TOKENS", (FEW_ROWS, MANY_ROWS))
    reached = {}
    rng = np.random.default_rng(5)
    for claim in sorted(claims(subject, "weights")):
        fmt = claim.partition(":")[2]
        (planned,) = subject.plan(facts(make_layer(), fmt), config(subject)).formats
        assert planned.native is (subject.capabilities.get(claim).support is Support.NATIVE)
        if not planned.native:
            reached[claim] = ["widened at load"]
            continue
        columns = max(128, FORMATS[fmt].block_elements)
        for dtype in ("bfloat16", "float32") if whole or fmt.startswith("FP8") else ("bfloat16",):
            spec = LinearSpec(name="w", out_features=16, in_features=columns, dtype=dtype)
            method = claiming(subject.ops, fmt, spec)
            linear_checks._try(subject, (make_view(fmt, 16, columns, rng),), dtype, None, rng)
            reached.setdefault(claim, []).append(f"{method.name} with {dtype} activations")
    assert len(reached) > len(FORMATS) / 2
    show(capsys, subject, "linears", reached)


def test_a_claim_without_a_method_would_be_found(subject):
    assert "weights:Q9_9" not in claims(subject, "weights")
    with pytest.raises(AssertionError, match="no linear method takes it"):
        claiming(subject.ops, "Q9_9", LinearSpec(name="w", out_features=16, in_features=256, dtype="bfloat16"))
