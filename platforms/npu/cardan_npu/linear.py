"""Linears by torch_npu's quantized products: W8A8 with a calibrated step or one for each token, W8A16 and W4A16.

It knows no checkpoint. Which call takes which format, and where FRACTAL_NZ is documented to pay, stands here.

Sources: op-plugin, docs/context: torch_npu-npu_quant_matmul.md, torch_npu-npu_weight_quant_batchmatmul.md,
torch_npu-npu_dynamic_quant.md, torch_npu-npu_quantize.md, torch_npu-npu_convert_weight_to_int4pack.md and
npu_format_cast.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np
import torch
import torch_npu

from cardan.errors import UnsupportedError
from cardan.platform import ActivationCodes, LinearMethod, LinearSpec, PackedWeight
from cardan.quantization import ActivationStep, activation_step, format_spec
from cardan.types import Float32Array, Int32Array, TensorView
from cardan_npu.formats import ROUNDED_FORMATS, W4_FORMATS, W8_FORMATS
from cardan_npu.repacking import Codes, take_apart
from cardan_torch import DenseWeight, torch_dtype

FRACTAL_NZ = 29
MOST_SIZE = 65535
LARGEST_CODE = 127
MOST_ACTIVATION = 128
"""Of a code of activations."""
LARGEST_SUM = 2**31 - 1


class QuantWeight(PackedWeight):
    """What the packed weights here share: rows are gathered from codes that are widened.

    Attributes:
        tensors: all that is held on the device.
    """

    tensors: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of everything held."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``PackedWeight.gather``."""
        codes, scales, dtype = self._rows(ids)
        groups = scales.shape[1]
        wide = codes.float().view(len(ids), groups, -1).mul_(scales.float()[:, :, None])
        return wide.flatten(1).to(dtype)

    @abc.abstractmethod
    def _rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
        """Codes ``[n, in_features]`` and scales ``[n, groups]`` of rows, and the type of activations."""


class WidenedOnTheWay(QuantWeight):
    """Codes that ``npu_weight_quant_batchmatmul`` widens to the type of the activations: W8A16 and W4A16.

    The documentation takes FRACTAL_NZ for it in graphs of torch.compile only, so the codes stay as they are.
    """

    def __init__(
        self, codes: Codes, spec: LinearSpec, bits: int, bias: torch.Tensor | None, device: torch.device
    ) -> None:
        """Bring codes to the device; ``codes`` must have a scale a row, or groups of whole multiples of 32."""
        dtype = torch_dtype(spec.dtype)
        self._bits, self._dtype = bits, dtype
        one_scale = codes.scales.shape[1] == 1
        self._group = 0 if one_scale else codes.group
        if bits == 4:
            wide = torch.from_numpy(codes.values.astype(np.int32)).to(device)
            self._weight = torch_npu.npu_convert_weight_to_int4pack(wide)
        else:
            self._weight = torch.from_numpy(codes.values).to(device)
        self._scales = torch.from_numpy(np.ascontiguousarray(codes.scales.T)).to(device).to(dtype)
        biased = torch.float32 if dtype is torch.bfloat16 else dtype
        self._bias = None if bias is None else bias.to(dtype).to(biased)
        self.tensors = tuple(x for x in (self._weight, self._scales, self._bias) if x is not None)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """See ``PackedWeight.apply``."""
        if x.shape[0] == 0:
            return x.new_empty((0, self._scales.shape[1]))
        out: torch.Tensor = torch_npu.npu_weight_quant_batchmatmul(
            x, self._weight.t(), self._scales, bias=self._bias, antiquant_group_size=self._group
        )
        return out

    def _rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
        rows = self._weight.index_select(0, ids)
        if self._bits == 4:
            places = torch.arange(0, 32, 4, dtype=torch.int32, device=rows.device)
            nibbles = (rows[:, :, None] >> places) & 15
            rows = torch.where(nibbles > 7, nibbles - 16, nibbles).flatten(1)
        return rows, self._scales.index_select(1, ids).t(), self._dtype


class CodesTimesCodes(QuantWeight):
    """What the products of codes share: the weight in FRACTAL_NZ, which is recommended where it is not transposed."""

    def __init__(self, codes: Codes, spec: LinearSpec, device: torch.device) -> None:
        """Bring codes to the device; ``codes`` must have a scale a row."""
        self._dtype = torch_dtype(spec.dtype)
        across = torch.from_numpy(np.ascontiguousarray(codes.values.T)).to(device)
        self._weight = torch_npu.npu_format_cast(across, FRACTAL_NZ)
        self._scales = torch.from_numpy(np.ascontiguousarray(codes.scales[:, 0])).to(device)

    def _rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
        return self._weight.index_select(1, ids).t(), self._scales.index_select(0, ids)[:, None], self._dtype


class RoundedByToken(CodesTimesCodes):
    """Activations are rounded to int8 with a step for each token: W8A8 dynamic."""

    def __init__(self, codes: Codes, spec: LinearSpec, bias: torch.Tensor | None, device: torch.device) -> None:
        """Bring codes to the device; ``codes`` must have a scale a row."""
        super().__init__(codes, spec, device)
        self._bias = None if bias is None else bias.to(self._dtype).float()
        self.tensors = tuple(x for x in (self._weight, self._scales, self._bias) if x is not None)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """See ``PackedWeight.apply``."""
        if x.shape[0] == 0:
            return x.new_empty((0, len(self._scales)))
        rounded, steps = torch_npu.npu_dynamic_quant(x)
        out: torch.Tensor = torch_npu.npu_quant_matmul(
            rounded,
            self._weight,
            self._scales,
            pertoken_scale=steps,
            bias=self._bias,
            output_dtype=self._dtype,
        )
        return out


class RoundedAsCalibrated(CodesTimesCodes):
    """Activations are rounded to int8 by the step that the checkpoint has for all tokens: W8A8 static.

    ``(codes @ weight + added) * step * scales``, where ``added`` takes back what the code of 0 adds.
    """

    def __init__(
        self, codes: Codes, spec: LinearSpec, rounded: ActivationStep, added: Int32Array, device: torch.device
    ) -> None:
        """Bring codes to the device; ``codes`` must have a scale a row, and ``added`` comes from ``added_to_sums``."""
        super().__init__(codes, spec, device)
        self._bias = torch.from_numpy(added).to(device)
        self._products = torch.from_numpy(_products(codes, rounded)).to(device)
        self._step = torch.tensor([rounded.step], dtype=torch.float32).to(device)
        self._zero = torch.tensor([rounded.zero], dtype=torch.int32).to(device)
        self.tensors = (self._weight, self._scales, self._bias, self._products, self._step, self._zero)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """See ``PackedWeight.apply``."""
        if x.shape[0] == 0:
            return x.new_empty((0, len(self._scales)))
        rounded = torch_npu.npu_quantize(x, self._step, self._zero, torch.qint8)
        out: torch.Tensor = torch_npu.npu_quant_matmul(
            rounded, self._weight, self._products, bias=self._bias, output_dtype=self._dtype
        )
        return out


def added_to_sums(codes: Codes, rounded: ActivationStep, bias: Float32Array | None) -> Int32Array | None:
    """What is added to each row's sum of products of codes, the bias in them; None where int32 cannot hold that.

    A bias is lost where the scale of its row is no normal number, and a sum may leave int32 where that is tiny.
    """
    sums = codes.values.astype(np.int64)
    added = -rounded.zero * sums.sum(axis=1)
    if bias is not None:
        products = _products(codes, rounded).astype(np.float64)
        lost = (bias != 0) & (np.abs(products) < np.finfo(np.float32).tiny)
        if lost.any():
            return None
        shares = np.divide(bias, products, out=np.zeros_like(products), where=bias != 0)
        if (np.abs(shares) > LARGEST_SUM).any():
            return None
        added = added + np.rint(shares).astype(np.int64)
    room = LARGEST_SUM - MOST_ACTIVATION * np.abs(sums).sum(axis=1)
    return None if (np.abs(added) > room).any() else added.astype(np.int32)


def _products(codes: Codes, rounded: ActivationStep) -> Float32Array:
    """What a product of a code and a code counts, for each row."""
    return (codes.scales[:, 0].astype(np.float64) * rounded.step).astype(np.float32)


class NpuQuantLinear(LinearMethod):
    """The quantized products."""

    name = "npu-quant"

    def __init__(self, device: torch.device) -> None:
        """Pack for a device."""
        self.device = device

    def claims(self, fmt: str, spec: LinearSpec) -> str | None:
        """See ``LinearMethod.claims``."""
        if spec.quantize is not None:
            return f"weights are not quantized at load here, and {spec.quantize} was asked for"
        if fmt not in (*W4_FORMATS, *W8_FORMATS, *ROUNDED_FORMATS):
            return f"torch_npu has no product for {fmt}"
        if spec.dtype not in ("float16", "bfloat16"):
            return f"torch_npu's quantized products take float16 and bfloat16, not {spec.dtype}"
        block = format_spec(fmt).block_elements
        if spec.in_features % block:
            return f"rows of {spec.in_features} are no whole blocks of {block}"
        if max(spec.in_features, spec.out_features) > MOST_SIZE:
            return f"torch_npu's quantized products take sizes up to {MOST_SIZE}"
        return None

    def activation_codes(self, fmt: str, spec: LinearSpec) -> ActivationCodes | None:
        """See ``LinearMethod.activation_codes``; rows of several scales are multiplied by activations as they are."""
        return ActivationCodes(LARGEST_CODE, None) if fmt in ROUNDED_FORMATS else None

    def pack(self, views: Sequence[TensorView], spec: LinearSpec, bias: torch.Tensor | None) -> PackedWeight:
        """Take blocks apart, and lay codes out as the products want them.

        Where scales are too small for the float16 that W8A16 and W4A16 want of them, values are kept dense.

        Raises:
            UnsupportedError: a view cannot be taken, formats differ, or rows are missing.
        """
        held = list(views)
        for view in held:
            reason = self.claims(view.dtype, spec)
            if reason is not None:
                raise UnsupportedError(f"{view.name} cannot be packed for {spec.name}: {reason}. Widen it first.")
        fmt, codes = held[0].dtype, take_apart(held, spec)
        if codes.by_row:
            codes = Codes(codes.values, codes.scales[:, :1], spec.in_features)
            if fmt in ROUNDED_FORMATS:
                return self._pack_rounded(codes, spec, {activation_step(view) for view in held}, bias)
        if spec.dtype == "float16" and not codes.scales_fit_float16:
            dtype = torch_dtype(spec.dtype)
            widened = torch.from_numpy(codes.widened()).to(dtype).to(self.device)
            return DenseWeight(widened, None if bias is None else bias.to(dtype))
        return WidenedOnTheWay(codes, spec, format_spec(fmt).bits, bias, self.device)

    def _pack_rounded(
        self, codes: Codes, spec: LinearSpec, steps: set[ActivationStep | None], bias: torch.Tensor | None
    ) -> PackedWeight:
        """With the calibrated step, where all of the rows have the same one, and what is added fits its sums.

        Results in float16 take a step for each token: with one step for all, ``npu_trans_quant_param`` would cut
        float32 scales to 19 bits on the way, by more than float16 rounds.
        """
        rounded = steps.pop() if len(steps) == 1 else None
        if rounded is not None and spec.dtype != "float16":
            held = None if bias is None else bias.to(torch_dtype(spec.dtype)).float().cpu().numpy()
            added = added_to_sums(codes, rounded, held)
            if added is not None:
                return RoundedAsCalibrated(codes, spec, rounded, added, self.device)
        return RoundedByToken(codes, spec, bias, self.device)
