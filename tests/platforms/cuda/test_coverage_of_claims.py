"""Every attention and GEMM that a GPU platform claims is what a plan leads to, and is run: the table is printed."""

from __future__ import annotations

import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from emulated_gpu import PLATFORMS, emulated  # noqa: E402

from cardan.config import EngineConfig, ModelConfig, PlatformConfig  # noqa: E402
from cardan.platform import LinearSpec, ModelFacts, Support  # noqa: E402
from cardan.quantization import FORMATS  # noqa: E402
from cardan.testing.conformance import Subject  # noqa: E402
from cardan.testing.conformance.attention_bench import Row  # noqa: E402
from cardan.testing.conformance.attention_checks import make_layer, try_case  # noqa: E402
from cardan.testing.conformance.linear_checks import _try, claiming, make_view  # noqa: E402
from cardan.types import ForwardMode, KVKind  # noqa: E402

KINDS = {
    "plain": {},
    "window": {"window": 5, "kind": KVKind.SLIDING},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
}
BATCHES = {
    "decode": (ForwardMode.DECODE, (Row(9, 1), Row(0, 1))),
    "prefill": (ForwardMode.EXTEND, (Row(3, 5), Row(0, 4))),
    "mixed": (ForwardMode.MIXED, (Row(3, 5), Row(8, 1))),
}


def facts(layer, fmt="BF16", dtype="bfloat16"):
    return ModelFacts(
        name="m", architecture="LlamaForCausalLM", family="llama", num_layers=1, hidden_size=64, intermediate_size=64,
        vocab_size=100, context_length=128, layers=(layer,), num_parameters=1, weight_bytes=1,
        weight_formats={fmt: 1}, native_dtype=dtype,
    )  # fmt: skip


def show(lines):
    sys.stdout.write("\n".join(lines) + "\n")


@pytest.fixture(scope="module", params=PLATFORMS)
def subject(request):
    with Subject(emulated(request.param), quick=True, options=("device=emulated",)) as found:
        yield found


def config(subject, **platform):
    return EngineConfig(
        model=ModelConfig(model="m"),
        platform=PlatformConfig(platform=subject.platform.name, options=("device=emulated",), **platform),
    )


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_every_attention_that_is_claimed(subject, capsys):
    """Each backend over each kind of layer, in each kind of step, and over each type of keys and values."""
    ran = []
    for backend in subject.capabilities.family("attention"):
        for kind, changes in KINDS.items():
            layer = make_layer(**changes)
            plan = subject.plan(facts(layer), config(subject, attention_backend=backend))
            for phase in ("prefill", "decode"):
                assert plan.value(f"{phase}_attention_backend") == backend
            for batch, (mode, rows) in BATCHES.items():
                try_case(subject, backend, mode, rows, layer)
                ran.append(f"attention {backend} {kind} {batch}")
        for kv_dtype in subject.capabilities.family("kv_dtype"):
            plan = subject.plan(facts(make_layer()), config(subject, kv_cache_dtype=kv_dtype))
            assert plan.kv_cache_dtype == kv_dtype
            for batch in ("decode", "prefill"):
                try_case(subject, backend, *BATCHES[batch], make_layer(), kv_dtype=kv_dtype)
                ran.append(f"attention {backend} {batch} over {kv_dtype}")
    with capsys.disabled():
        show((f"\n{subject.platform.name}: {len(ran)} variants of attention reached through the plan", *ran))


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_every_gemm_that_is_claimed(subject, capsys):
    """Each format of weights by the method that takes it, for one row and for many."""
    ran, widened = [], []
    rng = np.random.default_rng(5)
    for feature, answer in subject.capabilities.features.items():
        family, _, fmt = str(feature).partition(":")
        if family != "weights" or answer.support is Support.UNSUPPORTED:
            continue
        (planned,) = subject.plan(facts(make_layer(), fmt), config(subject)).formats
        assert planned.native is (answer.support is Support.NATIVE)
        if not planned.native:
            widened.append(fmt)
            continue
        columns = max(128, FORMATS[fmt].block_elements)
        for dtype in ("bfloat16", "float32"):
            spec = LinearSpec(name="w", out_features=16, in_features=columns, dtype=dtype)
            method = claiming(subject.ops, fmt, spec)
            _try(subject, (make_view(fmt, 16, columns, rng),), dtype, None, rng)
            ran.append(f"{fmt} by {method.name} with {dtype} activations")
    assert not [fmt for fmt in widened if fmt in {line.partition(" ")[0] for line in ran}]
    with capsys.disabled():
        show((f"\n{subject.platform.name}: {len(ran)} variants of linears reached through the plan", *ran))
        show((f"{len(widened)} formats are widened at load: {', '.join(widened)}",))


def test_a_claim_without_a_method_would_be_found(subject):
    answers = subject.capabilities.features
    assert "weights:Q9_9" not in answers
    with pytest.raises(AssertionError, match="no linear method takes it"):
        claiming(subject.ops, "Q9_9", LinearSpec(name="w", out_features=16, in_features=256, dtype="bfloat16"))
