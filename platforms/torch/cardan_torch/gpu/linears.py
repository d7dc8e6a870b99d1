"""Linears of GPUs: dense weights by torch, coded ones by Triton, codes on both sides by torch or Triton.

It knows no model. Formats are neutral layouts by the time that kernels see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from cardan.platform import ActivationCodes, LinearMethod, LinearSpec, PackedWeight
from cardan.types import TensorView
from cardan_kernels import linear
from cardan_kernels.quantize import quantize_rows
from cardan_torch.linear import DenseLinear, DenseWeight
from cardan_torch.tensors import torch_dtype

INT8_CODES = ActivationCodes(largest=127, group=None)
FLOAT8_LARGEST = 14
"""Floats E4M3 have steps of 32 below their largest, 448: half a step is as much as with 14 whole ones."""

GROUP = 128
"""Activations that share a scale where the weight's elements have one for a group of a row."""

MULTIPLE = 16
"""Sizes that torch's GEMM of floats of 8 bits takes multiples of."""

WIDENED_ROWS = 8192
"""Of a dense weight that are widened at a time."""


class GpuDenseWeight(DenseWeight):
    """A dense weight, whose products may stay in float32."""

    def apply_float32(self, x: torch.Tensor) -> torch.Tensor:
        """As ``apply``, in float32, which NVIDIA's GEMM leaves as it is; others' are of widened numbers.

        torch refuses such a product of numbers of 16 bits on the host, and in some builds for AMD's GPUs.
        """
        if x.dtype is torch.float32 or len(x) == 0:
            return self.apply(x).float()
        if x.device.type == "cpu" or torch.version.hip is not None:
            out = self._widened(x)
        else:
            out = torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return out if self.bias is None else out.add_(self.bias)

    def _widened(self, x: torch.Tensor) -> torch.Tensor:
        """The product of float32, some rows of the weight at a time: all of it widened may not fit."""
        wide, parts = x.float(), torch.split(self.weight, WIDENED_ROWS)
        return torch.cat([functional.linear(wide, rows.float()) for rows in parts], dim=-1)


class GpuDenseLinear(DenseLinear):
    """torch's GEMM."""

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
        """See ``DenseLinear.make``."""
        return GpuDenseWeight(weight, bias)


@dataclass(frozen=True, slots=True)
class CodedWeight(PackedWeight):
    """Codes that are multiplied as they are, with activations as they are.

    Attributes:
        matrix: the weight.
        bias: float32 ``[out_features]``, or None.
        dtype: of the activations.
    """

    matrix: linear.CodedMatrix
    bias: torch.Tensor | None
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""
        return self.matrix.num_bytes + (0 if self.bias is None else self.bias.nbytes)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """See ``PackedWeight.apply``."""
        return linear.coded_linear(x, self.matrix, self.bias)

    def apply_float32(self, x: torch.Tensor) -> torch.Tensor:
        """As ``apply``, in float32."""
        return linear.coded_linear(x, self.matrix, self.bias, out_dtype=torch.float32)

    def apply_add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """``residual`` and the product, rounded once."""
        return linear.coded_linear(x, self.matrix, self.bias, residual)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``PackedWeight.gather``."""
        return linear.coded_rows(ids, self.matrix, self.dtype)


class CodedLinear(LinearMethod):
    """Triton's kernels over codes of 4 and 8 bits with a scale for each group."""

    name = "coded"

    def __init__(self, device: torch.device, refused: frozenset[str] = frozenset()) -> None:
        """Make a method; ``refused`` are formats that the chip does not take, for a reason of its vendor's."""
        self._device = device
        self._refused = refused

    def claims(self, fmt: str, spec: LinearSpec) -> str | None:
        """Formats that have a neutral layout."""
        if fmt in self._refused:
            return f"{fmt} is a format of another vendor's chips"
        if fmt not in linear.LAYOUTS:
            return f"{fmt} has no layout that Triton's kernels take"
        if spec.in_features % linear.LAYOUTS[fmt].elements:
            return f"rows of {spec.in_features} are no whole blocks of {linear.LAYOUTS[fmt].elements}"
        return None

    def pack(self, views: Sequence[TensorView], spec: LinearSpec, bias: torch.Tensor | None) -> PackedWeight:
        """See ``LinearMethod.pack``."""
        matrix = linear.pack_coded(views, spec.in_features, self._device)
        return CodedWeight(matrix, bias, torch_dtype(spec.dtype))


@dataclass(frozen=True, slots=True)
class ScaledWeight(PackedWeight):
    """Codes that the chip multiplies with codes of the activations.

    Attributes:
        matrix: the weight.
        bias: float32 ``[out_features]``, or None.
        dtype: of the activations.
        by_torch: whether torch's GEMM takes it.
    """

    matrix: linear.ScaledMatrix
    bias: torch.Tensor | None
    dtype: torch.dtype
    by_torch: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""
        return self.matrix.num_bytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def whole_rows(self) -> bool:
        """Whether a row of the weight has one scale."""
        return self.matrix.group == self.matrix.in_features

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """See ``PackedWeight.apply``."""
        grouped = not self.whole_rows and self.matrix.codes.dtype is not torch.int8
        codes, scales = quantize_rows(x, self.matrix.codes.dtype, grouped=grouped)
        if not self.by_torch or len(x) == 0:
            return linear.scaled_linear(codes, scales, self.matrix, self.bias, out_dtype=self.dtype)
        out = torch._scaled_mm(  # noqa: SLF001 - torch offers it under this name only
            codes,
            self.matrix.codes.t(),
            scale_a=scales,
            scale_b=self.matrix.scales,
            out_dtype=self.dtype,
        )
        return out if self.bias is None else out.add_(self.bias)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``PackedWeight.gather``."""
        codes = functional.embedding(ids, self.matrix.codes.view(torch.int8)).view(self.matrix.codes.dtype).float()
        scales = self.matrix.scales.t().index_select(0, ids).repeat_interleave(self.matrix.group, dim=1)
        return (codes * scales[:, : codes.shape[1]]).to(self.dtype)


class ScaledLinear(LinearMethod):
    """Codes of 8 bits on both sides: whole numbers where the format says so, floats where the chip multiplies them."""

    name = "scaled"

    def __init__(self, device: torch.device, float8: torch.dtype | None, *, torch_gemm: bool) -> None:
        """Make a method.

        Args:
            device: where weights go.
            float8: form of the chip's floats of 8 bits, None where it multiplies none.
            torch_gemm: whether torch's GEMM takes them on this chip.
        """
        self._device = device
        self._float8 = float8
        self._torch_gemm = torch_gemm

    def claims(self, fmt: str, spec: LinearSpec) -> str | None:
        """Formats of 8 bits, unless activations are float32 and so want exact products."""
        layout = linear.LAYOUTS.get(fmt)
        if layout is None or not (layout.rounds or fmt.startswith("FP8_")):
            return f"{fmt} is not multiplied with activations of 8 bits"
        if spec.in_features % layout.elements:
            return f"rows of {spec.in_features} are no whole blocks of {layout.elements}"
        if layout.rounds:
            return None
        if self._float8 is None:
            return "this chip multiplies no floats of 8 bits"
        return "activations are float32, which are not rounded to 8 bits" if spec.dtype == "float32" else None

    def activation_codes(self, fmt: str, spec: LinearSpec) -> ActivationCodes | None:
        """Whole numbers of each token; floats of each token, or of its groups of 128: as many of them as are meant."""
        if linear.LAYOUTS[fmt].rounds:
            return INT8_CODES
        return ActivationCodes(largest=FLOAT8_LARGEST, group=None)

    def pack(self, views: Sequence[TensorView], spec: LinearSpec, bias: torch.Tensor | None) -> PackedWeight:
        """See ``LinearMethod.pack``."""
        matrix = linear.scaled_from(linear.pack_coded(views, spec.in_features, self._device), self._float8)
        whole = matrix.group == matrix.in_features
        fits = spec.in_features % MULTIPLE == 0 and spec.out_features % MULTIPLE == 0 and spec.dtype == "bfloat16"
        by_torch = self._torch_gemm and whole and fits and matrix.codes.dtype is not torch.int8
        return ScaledWeight(matrix, bias, torch_dtype(spec.dtype), by_torch)
