"""Every operation has a spec, and ``ReferenceOps`` computes what the spec says."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from cardan.ops import OP_SPECS, Ops, ReferenceOps, error_of, round_to, run_case
from cardan.ops.opspec import ROUNDOFF

METHODS = {name for name, member in vars(Ops).items() if inspect.isfunction(member) and not name.startswith("_")}


def test_every_operation_has_a_spec():
    covered = [name for spec in OP_SPECS.values() for name in (spec.covers or (spec.name,))]
    assert sorted(covered) == sorted(METHODS)
    assert Ops.__abstractmethods__ <= METHODS


@pytest.mark.parametrize("name", [name for name, spec in OP_SPECS.items() if not spec.covers])
def test_inputs_are_those_of_the_signature(name):
    assert [item.name for item in OP_SPECS[name].inputs] == list(inspect.signature(getattr(Ops, name)).parameters)[1:]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", OP_SPECS)
def test_reference_ops_agree_with_the_spec(name, dtype):
    ops, spec, count = ReferenceOps(dtype), OP_SPECS[name], 0
    for arguments in spec.cases(np.random.default_rng(1)):
        got, want = run_case(ops, spec, arguments, dtype, lambda values, bias, _: ops.pack(values, bias))
        assert len(got) == len(want) >= len(spec.outputs)
        for one, other in zip(got, want, strict=True):
            assert error_of(one, other) <= spec.tolerance(dtype), arguments
        count += 1
    assert count


@pytest.mark.parametrize("name", [name for name in OP_SPECS if name not in ("from_host", "to_host", "cast")])
def test_a_wrong_operation_is_noticed(name):
    """Each spec's cases tell its operation from one whose result is off by 5 %, or flipped."""
    spec = OP_SPECS[name]
    ops = ReferenceOps()
    errors = []
    for arguments in spec.cases(np.random.default_rng(1)):
        got, want = run_case(ops, spec, arguments, "float64", lambda values, bias, _: ops.pack(values, bias))
        spoilt = got[0] * 1.05 if np.issubdtype(got[0].dtype, np.floating) else got[0] ^ True
        errors.append(error_of(spoilt, want[0]))
    assert max(errors) > spec.tolerance("bfloat16")


def test_reference_ops_refuse_narrow_types():
    with pytest.raises(ValueError, match=r"float64 or float32, got 'bfloat16'. Pass one of these"):
        ReferenceOps("bfloat16")


def test_rounding_is_to_nearest_even():
    torch = pytest.importorskip("torch")
    values = np.concatenate([np.random.default_rng(0).normal(size=1000) * 1e3, [0.0, 1.00390625, 1.01171875, np.inf]])
    for dtype in ("bfloat16", "float16", "float32"):
        want = torch.tensor(values, dtype=torch.float32).to(getattr(torch, dtype)).double().numpy()
        np.testing.assert_array_equal(round_to(values.astype(np.float32), dtype), want)


def test_roundoff_is_half_the_spacing():
    torch = pytest.importorskip("torch")
    for dtype, roundoff in ROUNDOFF.items():
        assert roundoff == torch.finfo(getattr(torch, dtype)).eps / 2


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([1.0, -np.inf], [1.0, -np.inf], 0.0),
        ([1.0, 5.0], [1.0, -np.inf], np.inf),
        ([1.0, np.nan], [1.0, 2.0], np.inf),
        ([1, 2], [1, 3], np.inf),
        ([1, 2], [1, 2], 0.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([[1.0, 2.0]], [1.0, 2.0], np.inf),
    ],
)
def test_error_of(got, want, error):
    assert error_of(np.array(got), np.array(want)) == error
