"""The loader: what is packed as it is, widened, joined, kept in parts, shared or refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cardan.errors import CheckpointError, UnsupportedError
from cardan.ops import Ops
from cardan.platform import DeviceInfo, LinearMethod, LinearSpec, PackedWeight, Parameter, ParameterKind, Source
from cardan.quantization import dequantize, quantize
from cardan.runner.composite import CompositeWeight
from cardan.runner.loading import WeightLoader, Weights
from cardan.runner.ordered import OrderedWeight
from cardan.types import TensorView
from cardan_cpu.device import CpuDevice
from cardan_torch import DenseWeight

RNG = np.random.default_rng(0)
COLUMNS = 64


class MemoryCheckpoint:
    """A checkpoint made of arrays."""

    def __init__(self, tensors: Mapping[str, TensorView]) -> None:
        self.config: dict[str, Any] = {}
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        return self._tensors

    def tensor(self, name: str) -> TensorView:
        if name not in self._tensors:
            raise CheckpointError(f"no {name}")
        return self._tensors[name]

    def num_bytes(self, name: str) -> int:
        return len(self.tensor(name).data)

    def dequantize(self, view: TensorView) -> np.ndarray:
        return dequantize(view)

    def close(self) -> None:
        pass


class OneModel:
    """A model that has parameters and nothing else."""

    def __init__(self, *parameters: Parameter) -> None:
        self._parameters = parameters

    def parameters(self) -> tuple[Parameter, ...]:
        return self._parameters


class BlockWeight(PackedWeight):
    """Stands for a native quantized GEMM."""

    def __init__(self, values: torch.Tensor, bias: torch.Tensor | None, fmt: str) -> None:
        self.values, self.bias, self.fmt = values, bias, fmt

    @property
    def num_bytes(self) -> int:
        return 7

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.values, self.bias)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return self.values[ids]


class BlockLinear(LinearMethod):
    """Takes two block formats as they are."""

    name = "block"

    def claims(self, fmt: str, spec: LinearSpec) -> str | None:
        return None if fmt in ("Q4_0", "Q8_0") else "only Q4_0 and Q8_0"

    def pack(self, views: Any, spec: LinearSpec, bias: torch.Tensor | None) -> PackedWeight:
        assert {view.dtype for view in views} <= {"Q4_0", "Q8_0"}
        assert len({view.dtype for view in views}) == 1
        values = torch.from_numpy(np.concatenate([dequantize(view) for view in views]))
        return BlockWeight(values, bias, views[0].dtype)


class BlockDevice(CpuDevice):
    """A CPU device with a native block GEMM."""

    def linear_methods(self) -> tuple[LinearMethod, ...]:
        return (BlockLinear(), *super().linear_methods())


INFO = DeviceInfo(index=0, name="test cpu")
THREADS = torch.get_num_threads()


def view(name: str, values: np.ndarray, fmt: str = "F32") -> TensorView:
    values = np.ascontiguousarray(values, np.float32)
    if fmt == "F16":
        raw = values.astype(np.float16).tobytes()
    elif fmt == "BF16":
        raw = torch.from_numpy(values).bfloat16().view(torch.uint8).numpy().tobytes()
    else:
        raw = values.tobytes() if fmt == "F32" else bytes(quantize(values, fmt))
    return TensorView(name, fmt, values.shape, memoryview(raw))


def tensors(**formats: str) -> dict[str, TensorView]:
    """Matrices of 8 rows, by name and format."""
    return {name: view(name, RNG.standard_normal((8, COLUMNS)), fmt) for name, fmt in formats.items()}


def linear(
    *names: str, kind: ParameterKind = ParameterKind.LINEAR, bias: tuple[str, ...] = (), **rest: Any
) -> Parameter:
    shape = rest.pop("shape", (8 * len(names), COLUMNS))
    return Parameter(
        name=rest.pop("name", "p"), kind=kind, shape=shape,
        sources=tuple(Source(name) for name in names), bias=tuple(Source(name) for name in bias), **rest,
    )  # fmt: skip


def load(
    stored: Mapping[str, TensorView], *parameters: Parameter, device: type[CpuDevice] = CpuDevice,
    dtype: str = "float32", fallback: str = "auto", progress: Any = None,
) -> Weights:  # fmt: skip
    loader = WeightLoader(device(INFO, THREADS), MemoryCheckpoint(stored), dtype, fallback)
    return loader.load(OneModel(*parameters), progress)  # type: ignore[arg-type]


def values_of(stored: Mapping[str, TensorView], *names: str) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([dequantize(stored[name]).reshape(8, -1) for name in names]))


def test_block_formats_are_widened_exactly_and_noted() -> None:
    stored = tensors(a="Q4_1", b="Q4_1", c="Q8_0")
    weights = load(stored, linear("a", "b", "c"))
    assert torch.equal(weights.arrays["p"].weight, values_of(stored, "a", "b", "c"))
    assert weights.num_bytes == 24 * COLUMNS * 4
    assert any(note.startswith("2 tensors Q4_1 widened to float32 at load (dense: Q4_1") for note in weights.notes)
    assert any(note.startswith("1 tensors Q8_0 widened") for note in weights.notes)


def test_widening_holds_one_float32_tensor_at_a_time() -> None:
    stored = tensors(a="Q4_1", b="Q4_1", c="Q4_1")
    held = []

    class Watching(MemoryCheckpoint):
        def dequantize(self, view: TensorView) -> np.ndarray:
            import gc
            import weakref

            gc.collect()
            held.append(sum(ref() is not None for ref in refs))
            values = super().dequantize(view)
            refs.append(weakref.ref(values))
            return values

    refs: list[Any] = []
    loader = WeightLoader(CpuDevice(INFO, THREADS), Watching(stored), "bfloat16", "auto")
    loader.load(OneModel(linear("a", "b", "c")))  # type: ignore[arg-type]
    assert len(held) == 3
    assert max(held) <= 1


def test_refuses_to_widen_where_that_is_asked_for() -> None:
    with pytest.raises(
        UnsupportedError, match=r"a is Q4_1, which no linear of test cpu takes \(dense: .*--quantization-fallback auto"
    ):
        load(tensors(a="Q4_1"), linear("a"), fallback="refuse")


ORDERS = [np.random.default_rng(seed).permutation(COLUMNS).astype(np.int32) for seed in (5, 6)]


def ordered(stored: dict[str, TensorView], **orders: int) -> dict[str, TensorView]:
    """Tensors whose columns stand in one of ``ORDERS``."""
    return {**stored, **{name: replace(stored[name], order=ORDERS[which]) for name, which in orders.items()}}


def test_activations_are_brought_into_the_order_of_columns() -> None:
    stored = ordered(tensors(a="Q8_0", b="Q8_0"), a=0, b=0)
    weights = load(stored, linear("a", "b"), device=BlockDevice)
    packed, x = weights.arrays["p"], torch.randn(3, COLUMNS)
    assert isinstance(packed, OrderedWeight)
    torch.testing.assert_close(packed.apply(x), x @ values_of(stored, "a", "b").T)
    assert packed.num_bytes == weights.num_bytes == 7 + 4 * COLUMNS
    assert "1 linears have columns in act-order; activations are brought into it" in weights.notes
    with pytest.raises(TypeError, match="a weight with columns in another order is no embedding"):
        packed.gather(torch.tensor([0]))


def test_parts_whose_orders_differ_are_multiplied_apart() -> None:
    stored = ordered(tensors(a="Q8_0", b="Q8_0", c="Q8_0"), a=0, b=1)
    weights = load(stored, linear("a", "b", "c"), device=BlockDevice)
    x = torch.randn(3, COLUMNS)
    torch.testing.assert_close(weights.arrays["p"].apply(x), x @ values_of(stored, "a", "b", "c").T)
    assert [type(part).__name__ for part in weights.arrays["p"].parts] == ["OrderedWeight"] * 2 + ["BlockWeight"]


def test_columns_are_put_back_where_no_kernel_permutes_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(BlockDevice(INFO, THREADS).ops), "permute_columns", Ops.permute_columns)
    stored = ordered(tensors(a="Q8_0"), a=0)
    weights = load(stored, linear("a"), device=BlockDevice)
    assert torch.equal(weights.arrays["p"].weight, values_of(stored, "a"))
    assert any("no kernel here brings activations into it" in note for note in weights.notes)
    with pytest.raises(
        UnsupportedError, match=r"a is Q8_0, which no linear of test cpu takes \(its columns are in act"
    ):
        load(stored, linear("a"), device=BlockDevice, fallback="refuse")


def test_an_embedding_has_its_columns_in_order() -> None:
    stored = ordered(tensors(a="Q8_0"), a=0)
    weights = load(stored, linear("a", kind=ParameterKind.EMBEDDING), device=BlockDevice)
    ids = torch.tensor([6, 1], dtype=torch.int32)
    assert torch.equal(weights.arrays["p"].gather(ids), values_of(stored, "a")[[6, 1]])
    assert any("its columns are in act-order, and its rows are looked up" in note for note in weights.notes)


def test_dense_formats_that_differ_become_one_weight() -> None:
    stored = tensors(a="F32", b="BF16", c="F16")
    weights = load(stored, linear("a", "b", "c"))
    assert isinstance(weights.arrays["p"], DenseWeight)
    assert torch.equal(weights.arrays["p"].weight, values_of(stored, "a", "b", "c"))
    assert weights.notes == ()


def test_native_formats_that_differ_stay_in_parts_side_by_side() -> None:
    stored = tensors(a="Q4_0", b="Q4_0", c="Q8_0", d="F32") | {"bias": view("bias", RNG.standard_normal((1, 32)))}
    weights = load(stored, linear("a", "b", "c", "d", bias=("bias",)), device=BlockDevice)
    packed = weights.arrays["p"]
    assert isinstance(packed, CompositeWeight)
    assert [getattr(part, "fmt", "dense") for part in packed.parts] == ["Q4_0", "Q8_0", "dense"]
    assert packed.num_bytes == sum(part.num_bytes for part in packed.parts) == weights.num_bytes
    x = torch.from_numpy(RNG.standard_normal((3, COLUMNS))).float()
    bias = torch.from_numpy(dequantize(stored["bias"])[0])
    want = x.double() @ values_of(stored, "a", "b", "c", "d").double().T + bias.double()
    assert (packed.apply(x).double() - want).abs().max() < 1e-4
    assert any("1 fused linears kept in parts" in note and "first p" in note for note in weights.notes)
    with pytest.raises(TypeError, match="is no embedding"):
        packed.gather(torch.tensor([0]))


def test_an_embedding_of_several_formats_is_widened_so_that_rows_can_be_gathered() -> None:
    stored = tensors(a="Q4_0", b="Q8_0")
    weights = load(stored, linear("a", "b", kind=ParameterKind.EMBEDDING), device=BlockDevice)
    assert torch.equal(weights.arrays["p"].gather(torch.tensor([9, 1])), values_of(stored, "a", "b")[[9, 1]])


def test_a_native_format_is_packed_as_it_is() -> None:
    weights = load(tensors(a="Q4_0", b="Q4_0"), linear("a", "b"), device=BlockDevice, fallback="refuse")
    assert weights.arrays["p"].fmt == "Q4_0"
    assert (weights.notes, weights.num_bytes) == ((), 7)


@pytest.mark.parametrize("fmt", ["F32", "BF16", "Q8_0"])
def test_ranges_of_rows_cut_whole_rows(fmt: str) -> None:
    stored = tensors(a=fmt)
    parameter = Parameter(
        name="p", kind=ParameterKind.LINEAR, shape=(5, COLUMNS), sources=(Source("a", (6, 8)), Source("a", (0, 3)))
    )
    weights = load(stored, parameter)
    assert torch.equal(weights.arrays["p"].weight, values_of(stored, "a")[[6, 7, 0, 1, 2]])


def test_vectors_are_float32_and_take_their_offset() -> None:
    stored = {"n": view("n", RNG.standard_normal(6), "BF16")}
    parameter = Parameter(name="n", kind=ParameterKind.VECTOR, shape=(6,), sources=(Source("n"),), add=1.0)
    got = load(stored, parameter, dtype="bfloat16").arrays["n"]
    assert got.dtype is torch.float32
    assert torch.equal(got, torch.from_numpy(dequantize(stored["n"])) + 1)


def test_a_tied_head_shares_storage_and_counts_once() -> None:
    embed = linear("a", kind=ParameterKind.EMBEDDING, name="embed")
    head = linear("a", name="head", tied_to="embed")
    weights = load(tensors(a="F32"), embed, head)
    assert weights.arrays["head"] is weights.arrays["embed"]
    assert weights.num_bytes == 8 * COLUMNS * 4


def test_progress_ends_at_the_whole_and_unused_tensors_are_noted() -> None:
    seen: list[tuple[int, int]] = []
    stored = tensors(a="F32", b="Q8_0", x1="F32", x2="F32", x3="F32", x4="F32")
    weights = load(stored, linear("a", name="a"), linear("b", name="b"), progress=lambda *at: seen.append(at))
    total = len(stored["a"].data) + len(stored["b"].data)
    assert seen == [(len(stored["a"].data), total), (total, total)]
    assert "4 tensors of the checkpoint are not used: x1, x2, x3 …" in weights.notes


def test_wrong_shapes_are_named() -> None:
    stored = tensors(a="F32")
    with pytest.raises(CheckpointError, match=r"p must be \[9, 64\], but its tensors are a \[8, 64\]"):
        load(stored, linear("a", shape=(9, COLUMNS)))
    with pytest.raises(CheckpointError, match=r"p must be \[16, 32\]"):
        load(stored, linear("a", shape=(16, 32)))
    vector = Parameter(name="v", kind=ParameterKind.VECTOR, shape=(5,), sources=(Source("a"),))
    with pytest.raises(CheckpointError, match="v must have 5 elements, but a has 512"):
        load(stored, vector)
