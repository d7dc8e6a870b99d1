"""TorchOps against the specs' float64 references, and what the specs cannot say: ties, noise, copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cardan.errors import UnsupportedError
from cardan.ops import OP_SPECS, philox, run_case
from cardan_torch import DenseWeight, TorchOps, torch_dtype

OPS = TorchOps()
CASES = [(name, dtype) for name, spec in OP_SPECS.items() for dtype in spec.dtypes]


def pack(values: np.ndarray, bias: np.ndarray | None, dtype: str) -> DenseWeight:
    kind = torch_dtype(dtype)
    return DenseWeight(torch.from_numpy(values).to(kind), None if bias is None else torch.from_numpy(bias).to(kind))


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_matches_the_reference_on_odd_shapes(name: str, dtype: str) -> None:
    spec = OP_SPECS[name]
    for arguments in spec.cases(np.random.default_rng(7)):
        assert run_case(OPS, spec, arguments, dtype, pack).excess <= 1, arguments


@pytest.mark.parametrize("k", [1, 2, 3, 64, 200])
def test_topk_breaks_ties_by_lower_id_across_threads_and_vector_lanes(k: int) -> None:
    values = np.random.default_rng(k).integers(0, 9, (3, 50_001)).astype(np.float32)
    got_values, got_ids = (OPS.to_host(x) for x in OPS.topk(torch.from_numpy(values), k))
    order = np.argsort(-values, axis=1, kind="stable")[:, :k]
    assert np.array_equal(got_ids, order)
    assert np.array_equal(got_values, np.take_along_axis(values, order, 1))
    assert got_ids.dtype == np.int32


def test_argmax_takes_the_first_of_equals() -> None:
    values = np.zeros((2, 40_000), np.float32)
    values[0, [39_999, 17, 20_000]] = 1
    assert OPS.to_host(OPS.argmax(torch.from_numpy(values))).tolist() == [17, 0]


@pytest.mark.parametrize("vocab", [1, 3, 4, 4097, 49_152])
def test_noise_has_the_bits_of_the_neutral_generator(vocab: int) -> None:
    seeds = np.array([0, 1, 2**63 + 11, 2**64 - 1], np.uint64)
    positions = np.array([0, 7, 2**31 - 1, 8191], np.int32)
    want = philox.gumbel(seeds, positions, vocab)
    assert np.array_equal(OPS.to_host(OPS.gumbel(seeds, positions, vocab)), want)
    ids = np.random.default_rng(0).integers(0, vocab, (4, 5)).astype(np.int32)
    got = OPS.to_host(OPS.gumbel(seeds, positions, torch.from_numpy(ids)))
    assert np.array_equal(got, np.take_along_axis(want, ids.astype(np.int64), 1))


def test_noise_of_more_blocks_than_one_pass_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, positions = np.arange(3, dtype=np.uint64), np.arange(3, dtype=np.int32)
    whole = OPS.gumbel(seeds, positions, 1001)
    monkeypatch.setattr("cardan_torch.noise.BLOCKS_PER_PASS", 50)
    assert torch.equal(OPS.gumbel(seeds, positions, 1001), whole)


def test_host_arrays_are_copied_both_ways() -> None:
    array = np.ones(3, np.float32)
    on_device = OPS.from_host(array)
    array[:] = 2
    assert on_device.tolist() == [1, 1, 1]
    back = OPS.to_host(on_device)
    on_device.fill_(5)
    assert back.tolist() == [1, 1, 1]


def test_bfloat16_comes_back_as_float32() -> None:
    assert OPS.to_host(OPS.cast(torch.ones(2), "bfloat16")).dtype == np.float32


def test_refuses_a_type_that_torch_does_not_compute_in() -> None:
    with pytest.raises(UnsupportedError, match="got 'fp8_e4m3'"):
        torch_dtype("fp8_e4m3")
