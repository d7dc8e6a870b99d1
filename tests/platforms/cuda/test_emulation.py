"""The stand-in for a GPU: what it records it runs again; what a GPU would not allow, or would wait for, it refuses."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from cardan.errors import ConfigError  # noqa: E402
from cardan_kernels import activation  # noqa: E402
from cardan_torch.gpu import emulation  # noqa: E402
from cardan_torch.gpu.emulation import EmulatedAccelerator, RuleError, no_waiting  # noqa: E402


@pytest.fixture
def gpu():
    return EmulatedAccelerator("sm_90")


def test_a_capture_gives_nothing_until_it_is_replayed_and_then_follows_its_inputs(gpu):
    x, weight = torch.arange(4.0), torch.eye(4)

    def run():
        product = x @ weight
        product[1:] += 1.0
        return (torch.nn.functional.silu(product)[:3],)

    work, (result,) = gpu.capture(run)
    assert torch.isnan(result).all()
    for values in ([0.0, 1.0, 2.0, 3.0], [-1.0, 5.0, 0.5, 9.0]):
        x.copy_(torch.tensor(values))
        work.replay()
        want = torch.nn.functional.silu(torch.tensor(values) + torch.tensor([0.0, 1.0, 1.0, 1.0]))[:3]
        assert torch.equal(result, want)


def test_interpreted_kernels_are_part_of_a_capture(gpu):
    gate_up = torch.randn(3, 8)
    work, (result,) = gpu.capture(lambda: (activation.silu_mul(gate_up, 4) * 2.0,))
    gate_up.copy_(torch.ones(3, 8))
    work.replay()
    want = 2 * torch.nn.functional.silu(torch.ones(3, 4))
    assert torch.allclose(result, want)


def test_memory_from_outside_must_stay_where_it_was(gpu):
    held = {"x": torch.ones(3)}
    work, _ = gpu.capture(lambda: (held["x"] * 2,))
    work.replay()
    del held["x"]
    with pytest.raises(RuleError, match="reads memory that was given back"):
        work.replay()


def test_a_capture_that_only_returns_what_it_was_given_is_refused(gpu):
    x = torch.ones(3)
    with pytest.raises(RuleError, match="returns memory that it does not write"):
        gpu.capture(lambda: (x,))


WAITS = {
    ".item()": lambda x: x.sum().item(),
    ".tolist()": lambda x: x.tolist(),
    ".cpu()": lambda x: x.cpu(),
    ".numpy()": lambda x: x.numpy(),
    "bool(tensor)": lambda x: bool(x.any()),
    "int(tensor)": lambda x: int(x.sum()),
    "float(tensor)": lambda x: float(x.sum()),
    "nonzero": lambda x: x.nonzero(),
    "aten.index by a mask of bools": lambda x: x[x > 0],
    "aten.masked_select": lambda x: x.masked_select(x > 0),
    "aten._unique2": lambda x: x.unique(),
    "aten.equal": lambda x: torch.equal(x, x),
    "aten.repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([1, 2, 3])),
    "torch.tensor, a copy from pageable memory": lambda x: torch.tensor([1.0]),
}


@pytest.mark.parametrize("what", WAITS)
def test_whatever_waits_is_refused_by_name(gpu, what):
    x = torch.arange(3.0)
    counts = torch.tensor([1, 2, 3])
    waits = WAITS[what] if "repeat" not in what else lambda x: x.repeat_interleave(counts)
    with pytest.raises(RuleError) as refused, no_waiting("between launch and result"):
        waits(x)
    assert what in str(refused.value)
    assert "waits for the device between launch and result" in str(refused.value)
    with pytest.raises(RuleError, match="while work is captured"):
        gpu.capture(lambda: (x * 2, waits(x))[:1])


def test_copies_cannot_be_captured(gpu):
    x = torch.ones(2)
    for copy in (lambda: gpu.upload(np.ones(3)), lambda: gpu.download((x,)), gpu.memory):
        with pytest.raises(RuleError, match="cannot be captured"):
            gpu.capture(lambda copy=copy: (x * 2, copy())[:1])
    assert gpu.upload(np.ones(3)).tolist() == [1.0, 1.0, 1.0]


def test_results_are_copied_as_late_as_they_may_be_and_what_comes_later_does_not_change_them(gpu):
    x = torch.ones(3)
    fetch = gpu.download((x, x.to(torch.bfloat16), x > 0))
    x.zero_()
    first, narrow, flags = fetch.wait()
    assert first.tolist() == [1.0, 1.0, 1.0]
    assert narrow.dtype == np.float32
    assert flags.all()


def test_it_runs_only_where_kernels_are_interpreted(monkeypatch):
    module = __import__("cardan_torch.gpu.emulation.accelerator", fromlist=["x"])
    monkeypatch.setattr(module, "interpreted", lambda: False)
    with pytest.raises(ConfigError, match=r"device=emulated .* TRITON_INTERPRET=1 in the environment"):
        emulation.EmulatedAccelerator("sm_90")
