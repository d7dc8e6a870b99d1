"""Every operation has a spec, and ``ReferenceOps`` computes what the spec says."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from cardan.ops import OP_SPECS, DenseWeight, Ops, ReferenceOps, at_most, round_to, run_case
from cardan.ops.bounds import Tried
from cardan.ops.rounding import ROUNDOFF, gamma, spread_factor

PROVIDERS = {"token_drawer", "logit_adjuster"}
"""Methods that compute nothing: they give a kernel, which is held to the sampler that it stands in for."""

METHODS = {
    name
    for name, member in vars(Ops).items()
    if inspect.isfunction(member) and not name.startswith("_") and name not in PROVIDERS
}


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
        trial = run_case(ops, spec, arguments, dtype, lambda values, bias, _: ops.pack(values, bias))
        assert len(trial.got) == len(trial.want) >= len(spec.outputs)
        assert trial.excess <= 1, arguments
        count += 1
    assert count


@pytest.mark.parametrize("name", [name for name in OP_SPECS if name not in ("from_host", "to_host", "cast")])
def test_a_wrong_operation_is_noticed(name):
    """Each spec's cases tell its operation from one whose result is off by 5 %, or flipped, in the coarsest type."""
    spec = OP_SPECS[name]
    ops = ReferenceOps()
    excesses = []
    for arguments in spec.cases(np.random.default_rng(1)):
        trial = run_case(ops, spec, arguments, "float64", lambda values, bias, _: ops.pack(values, bias))
        got, want = trial.got[0], trial.want[0]
        spoilt = got * 1.05 if np.issubdtype(got.dtype, np.floating) else got ^ True
        allowed = spec.bound(Tried(exact_arguments(spec, arguments), trial.want, spec.dtypes[-1]))[0]
        excesses.append(at_most(spoilt, want, allowed))
    assert max(excesses) > 1


def exact_arguments(spec, arguments):
    """What the bounds of a case are made from."""
    return tuple(
        argument.astype(np.float64) if isinstance(argument, np.ndarray) and argument.dtype == np.float32 else argument
        for argument in arguments
    )


def trial_of(name, arguments, call, dtype="float32"):
    """A case of an operation that is computed as the test says."""

    class Changed(ReferenceOps):
        pass

    setattr(Changed, name, lambda self, *given: call(*given))
    ops = Changed()
    return run_case(ops, OP_SPECS[name], arguments, dtype, lambda values, bias, _: ops.pack(values, bias))


def test_each_element_is_held_to_its_own_size():
    """A small result next to a large one may not be off by what the large one is rounded by."""
    x = np.array([[0.0, 20.0]], np.float32)
    assert trial_of("exp", (x,), np.exp).excess <= 1
    assert trial_of("exp", (x,), lambda x: np.exp(x) + np.array([[1e-5, 0.0]])).excess > 10


def test_sums_of_a_vocabulary_are_held_to_independent_roundings():
    x = np.random.default_rng(0).normal(size=(3, 50_001)).astype(np.float32) * 4

    def narrow(x):
        return np.log(np.exp(x.astype(np.float32)).sum(axis=-1, dtype=np.float32))

    assert trial_of("logsumexp", (x,), narrow).excess < 0.1
    assert trial_of("logsumexp", (x,), lambda x: narrow(x) + 2e-4).excess > 1


@pytest.mark.parametrize("dropped", [1, 4])
def test_a_dropped_column_of_many_is_noticed(dropped):
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(3, 2048)), DenseWeight(rng.normal(size=(33, 2048)) / 45)
    for dtype, least in (("float32", 100), ("bfloat16", 1)):
        part = trial_of("linear", (x, weight), lambda x, w: x[:, :-dropped] @ w.values[:, :-dropped].T, dtype)
        assert part.excess > least


def test_norms_rounded_before_their_weight_pass_and_those_over_other_columns_do_not():
    rng = np.random.default_rng(0)
    arguments = (rng.normal(size=(4, 576)), rng.normal(size=576), 1e-5)

    def before(x, weight, eps):
        return round_to(
            round_to(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps), "bfloat16") * weight, "bfloat16"
        )

    def padded(x, weight, eps):
        return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) / 592 + eps) * weight

    assert 0.5 < trial_of("rms_norm", arguments, before, "bfloat16").excess <= 1
    assert trial_of("rms_norm", arguments, padded, "bfloat16").excess > 1


@pytest.mark.parametrize(("name", "rounded_once"), [("linear_float32", False), ("linear_add", True)])
def test_fused_linears_round_no_product_by_itself(name, rounded_once):
    """A table's own kernel is held to what it promises, one that leaves it to the composition to what that rounds."""
    rng = np.random.default_rng(0)
    residual = (rng.normal(size=(4, 33)) * 0.01,) if rounded_once else ()
    arguments = (rng.normal(size=(4, 576)), DenseWeight(rng.normal(size=(33, 576)) / 24), *residual)

    def fused(x, weight, *rest):
        total = weight.apply(x) + sum(rest)
        return round_to(total, "bfloat16") if rounded_once else total.astype(np.float32)

    def rounded_before(x, weight, *rest):
        return round_to(round_to(weight.apply(x), "bfloat16") + sum(rest), "bfloat16")

    class Composed(ReferenceOps):
        linear = staticmethod(lambda x, weight: round_to(weight.apply(x), "bfloat16"))
        add = staticmethod(lambda a, b: round_to(a + b, "bfloat16"))

    assert trial_of(name, arguments, fused, "bfloat16").excess <= 1
    assert trial_of(name, arguments, rounded_before, "bfloat16").excess > 1
    left = run_case(
        Composed(), OP_SPECS[name], arguments, "bfloat16", lambda values, bias, _: DenseWeight(values, bias)
    )
    assert 0.3 < left.excess <= 1
    assert not Composed().has_linear_add


def test_columns_are_permuted_by_pieces_where_there_is_no_kernel():
    class Composed(ReferenceOps):
        permute_columns = Ops.permute_columns

    for arguments in OP_SPECS["permute_columns"].cases(np.random.default_rng(3)):
        np.testing.assert_array_equal(Composed().permute_columns(*arguments), arguments[0][:, arguments[1]])
    assert ReferenceOps().has_permute_columns
    assert not Composed().has_permute_columns


def test_a_running_sum_starts_exactly():
    x = np.full((2, 100), 0.01, np.float32)
    assert trial_of("cumsum", (x,), lambda x: np.cumsum(x.astype(np.float32), axis=-1, dtype=np.float32)).excess <= 1
    assert trial_of("cumsum", (x,), lambda x: np.cumsum(x, axis=-1) + 1e-7).excess > 1


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
    ("got", "want", "excess"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 2.0),
        ([1.0, -np.inf], [1.0, -np.inf], 0.0),
        ([1.0, 5.0], [1.0, -np.inf], np.inf),
        ([1.0, np.nan], [1.0, 2.0], np.inf),
        ([1.0, np.nan], [1.0, np.nan], 0.0),
        ([1, 2], [1, 3], np.inf),
        ([1, 2], [1, 2], 0.0),
        ([[1.0, 2.0]], [1.0, 2.0], np.inf),
    ],
)
def test_at_most(got, want, excess):
    assert at_most(np.array(got), np.array(want), 0.25) == excess


def test_nothing_is_allowed_where_values_are_moved():
    assert at_most(np.array([1.0]), np.array([np.nextafter(1.0, 2)]), 0.0) == np.inf


def test_sums_of_random_roundings_stay_within_gamma_and_reach_for_it():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4096)).astype(np.float32)
    off = np.abs(np.cumsum(x, axis=1, dtype=np.float32)[:, -1] - x.astype(np.float64).sum(axis=1))
    relative = off / np.abs(x.astype(np.float64)).sum(axis=1)
    assert gamma(4096, 300) / 300 < relative.max() < gamma(4096, 300)
    assert gamma(5, 300) == 5 * ROUNDOFF["float32"], "few roundings may all go one way"
    assert spread_factor(1) == pytest.approx(6.544, abs=1e-3)
