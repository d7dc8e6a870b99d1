"""The conformance suite on the stand-in for a GPU: what needs no long run always, other parts where there is time.

The rest of it is for ``TRITON_INTERPRET=1 cardan conform --platform cuda --platform-option device=emulated``.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from emulated_gpu import PLATFORMS, emulated

from cardan.testing.conformance import Status, Subject, collect, run_check

SLOW_PARTS = ("ops", "kv", "sampler", "graph/replay-equals-eager-LlamaForCausalLM", "end_to_end/overlapped")


def failures(name, *only):
    with Subject(emulated(name), quick=True, options=("device=emulated", "cuda_graph_max_bs_decode=4")) as subject:
        outcomes = [run_check(subject, check) for check in collect(subject, only)]
    assert any(outcome.status is Status.PASSED for outcome in outcomes)
    return {outcome.id: outcome.detail for outcome in outcomes if outcome.status is Status.FAILED}


@pytest.mark.parametrize("name", PLATFORMS)
def test_capabilities_and_memory(name):
    assert not failures(name, "capabilities", "memory")


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("part", SLOW_PARTS)
def test_other_parts(part):
    assert not failures("cuda", part)
