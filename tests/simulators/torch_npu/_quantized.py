# ruff: noqa: A002  parameters have the documented names
"""Quantized products and what prepares for them in the simulated torch_npu.

Sources: op-plugin, docs/context: torch_npu-npu_dynamic_quant.md, torch_npu-npu_quantize.md,
torch_npu-npu_quant_matmul.md, torch_npu-npu_weight_quant_batchmatmul.md, torch_npu-npu_convert_weight_to_int4pack.md,
torch_npu-npu_format_cast.md; products of codes are exact in int32 as there, and refused where they leave it.
"""

from __future__ import annotations

import torch

from torch_npu import _tensor
from torch_npu._refusal import refuse, require, require_dtype

FORMAT_ND = 2
FORMAT_NZ = 29
MOST_SIZE = 65535
MOST_SUM = 2**31 - 1
HALVES = (torch.float16, torch.bfloat16)


def get_npu_format(self: torch.Tensor) -> int:
    """The format tag of a tensor's storage."""
    held = getattr(self, "allocation", None)
    return FORMAT_ND if held is None or held.device_format is None else held.device_format


def npu_format_cast(input: torch.Tensor, acl_format: int) -> torch.Tensor:
    """A copy in another format; the simulator keeps the order of elements and remembers the format."""
    require(
        acl_format in (FORMAT_ND, FORMAT_NZ),
        "npu_format_cast",
        f"the simulator knows formats 2 and 29, got {acl_format}",
    )
    require(_tensor.state.recording is None, "npu_format_cast", "it is not for capture")
    if acl_format == FORMAT_NZ:
        require_dtype(input, (*HALVES, torch.int8, torch.float32), "npu_format_cast", "input")
        require(input.dim() >= 2, "npu_format_cast", "FRACTAL_NZ needs two dimensions")
    result: torch.Tensor = _tensor.call(_clone, (input,), {})
    result.allocation.device_format = acl_format  # type: ignore[attr-defined]
    return result


def npu_dynamic_quant(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of each token, and its step (torch_npu-npu_dynamic_quant.md)."""
    result: tuple[torch.Tensor, torch.Tensor] = _tensor.call(_dynamic_quant, (x,), {})
    return result


def npu_quantize(
    input: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    dtype: torch.dtype,
    axis: int = 1,
    div_mode: bool = True,
) -> torch.Tensor:
    """Codes by steps that are given (torch_npu-npu_quantize.md)."""
    result: torch.Tensor = _tensor.call(_quantize, (input, scales, zero_points, dtype, axis, div_mode), {})
    return result


def npu_quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Product of codes times steps (torch_npu-npu_quant_matmul.md)."""
    require(offset is None, "npu_quant_matmul", "offset is for int8 results, which the simulator does not have")
    result: torch.Tensor = _tensor.call(_quant_matmul, (x1, x2, scale, pertoken_scale, bias, output_dtype), {})
    return result


def npu_convert_weight_to_int4pack(weight: torch.Tensor, inner_k_tiles: int = 0) -> torch.Tensor:
    """Eight codes of 4 bits in each int32 (torch_npu-npu_convert_weight_to_int4pack.md)."""
    result: torch.Tensor = _tensor.call(_to_int4pack, (weight,), {})
    return result


def npu_weight_quant_batchmatmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    antiquant_scale: torch.Tensor,
    antiquant_offset: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    antiquant_group_size: int = 0,
) -> torch.Tensor:
    """Product of activations and codes that are widened on their way (torch_npu-npu_weight_quant_batchmatmul.md)."""
    function = "npu_weight_quant_batchmatmul"
    plain = quant_scale is None and quant_offset is None
    require(plain, function, "quant_scale is for int8 results, which the simulator does not have")
    if get_npu_format(weight) == FORMAT_NZ:
        refuse(function, "weight in FRACTAL_NZ is for graphs of torch.compile only")
    result: torch.Tensor = _tensor.call(
        _weight_quant_batchmatmul, (x, weight, antiquant_scale, antiquant_offset, bias, antiquant_group_size), {}
    )
    return result


def _clone(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def _dynamic_quant(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    require_dtype(x, HALVES, "npu_dynamic_quant", "x")
    require(x.dim() > 1, "npu_dynamic_quant", f"x must have more than one dimension, got {x.dim()}")
    wide = x.float()
    scale = wide.abs().amax(dim=-1) / 127
    codes = torch.where(scale[..., None] > 0, wide / scale[..., None], torch.zeros_like(wide)).round()
    return codes.clamp(-128, 127).to(torch.int8), scale


def _quantize(
    x: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    dtype: torch.dtype,
    axis: int,
    div_mode: bool,
) -> torch.Tensor:
    function = "npu_quantize"
    require_dtype(x, (*HALVES, torch.float32), function, "input")
    require(scales.dim() == 1, function, "scales must have one dimension")
    require(scales.numel() in (1, x.shape[axis]), function, f"scales must have 1 or {x.shape[axis]} elements")
    if div_mode:
        require_dtype(scales, (torch.float32, torch.bfloat16), function, "scales")
        require(
            dtype in (torch.qint8, torch.quint8, torch.int32),
            function,
            f"dtype must be qint8, quint8 or int32, got {dtype}",
        )
        if zero_points is not None:
            require_dtype(zero_points, (torch.int8, torch.uint8, torch.int32, torch.bfloat16), function, "zero_points")
    else:
        refuse(function, "the simulator knows div_mode=True")
    shape = [1] * x.dim()
    shape[axis] = scales.numel()
    codes = x.float() / scales.float().view(shape)
    if zero_points is not None:
        codes = codes + zero_points.float().view(shape)
    require(dtype is torch.qint8, function, "the simulator gives qint8 only")
    return codes.round().clamp(-128, 127).to(torch.int8)


def _quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    pertoken_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_dtype: torch.dtype | None,
) -> torch.Tensor:
    function = "npu_quant_matmul"
    require_dtype(x1, (torch.int8,), function, "x1")
    require_dtype(x2, (torch.int8,), function, "x2")
    require(x1.dim() == 2 and x2.dim() == 2, function, "the simulator knows x1 and x2 of two dimensions")
    require(x1.shape[1] == x2.shape[0], function, f"x1 {list(x1.shape)} and x2 {list(x2.shape)} do not fit")
    require(x1.numel() > 0 and x2.numel() > 0, function, "x1 and x2 must not be empty")
    largest = max(x1.shape[1], x2.shape[0], x2.shape[1])
    require(largest <= MOST_SIZE, function, f"the last dimensions must be at most {MOST_SIZE}, got {largest}")
    require(scale.dim() == 1 and scale.numel() in (1, x2.shape[1]), function, f"scale must be [1] or [{x2.shape[1]}]")
    _check_combination(scale, pertoken_scale, bias, output_dtype)
    product = x1.double() @ x2.double()
    if bias is not None:
        fits = tuple(bias.shape) == (x2.shape[1],)
        require(fits, function, f"bias must have one dimension, as long as x2's last, {x2.shape[1]}")
    if bias is not None and bias.dtype == torch.int32:
        product = product + bias.double()
    wrapped = float(product.abs().max()) > MOST_SUM
    require(not wrapped, function, f"a sum of products, with its bias, must stay within {MOST_SUM} of int32")
    out = product * scale.double()
    if pertoken_scale is not None:
        require(pertoken_scale.shape == (x1.shape[0],), function, f"pertoken_scale must be [{x1.shape[0]}]")
        out = out * pertoken_scale.double()[:, None]
    if bias is not None and bias.dtype != torch.int32:
        out = out + bias.double()
    return out.to(output_dtype)


def _check_combination(
    scale: torch.Tensor,
    pertoken_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_dtype: torch.dtype | None,
) -> None:
    """The table of types of the page."""
    function = "npu_quant_matmul"
    if output_dtype not in HALVES:
        refuse(function, f"output_dtype must be float16 or bfloat16 here (int8 is not simulated), got {output_dtype}")
    biases: tuple[torch.dtype, ...]
    if pertoken_scale is not None:
        require_dtype(pertoken_scale, (torch.float32,), function, "pertoken_scale")
    if output_dtype is torch.bfloat16:
        require_dtype(scale, (torch.float32, torch.bfloat16), function, "scale for bfloat16 results")
        biases = (torch.int32, torch.bfloat16, torch.float32)
    elif pertoken_scale is not None:
        require_dtype(scale, (torch.float32,), function, "scale for float16 results with pertoken_scale")
        # the older page names float16 besides, the newer one bfloat16: what both name is left
        biases = (torch.int32, torch.float32)
    else:
        refuse(
            function, "float16 results without pertoken_scale go through npu_trans_quant_param, which is not simulated"
        )
    if bias is not None:
        require_dtype(bias, biases, function, "bias")


def _to_int4pack(weight: torch.Tensor) -> torch.Tensor:
    function = "npu_convert_weight_to_int4pack"
    require_dtype(weight, (torch.int32,), function, "weight")
    require(weight.dim() == 2 and weight.is_contiguous(), function, "weight must be contiguous, of two dimensions")
    require(weight.shape[1] % 8 == 0, function, f"the last dimension must be a multiple of 8, got {weight.shape[1]}")
    require(int(weight.min()) >= -8 and int(weight.max()) <= 7, function, "values must be in -8 .. 7")
    nibbles = (weight.long() & 15).unflatten(1, (-1, 8)) << (4 * torch.arange(8))
    words = nibbles.sum(dim=-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _from_int4pack(packed: torch.Tensor) -> torch.Tensor:
    nibbles = (packed.long()[..., None] >> (4 * torch.arange(8))) & 15
    return torch.where(nibbles > 7, nibbles - 16, nibbles).flatten(-2)


def _codes(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Codes ``[K, N]``; packed ones lie packed along the last dimension of memory, a view's first."""
    if weight.dtype == torch.int8:
        return weight.float()
    if weight.is_contiguous() and weight.shape[0] == rows:
        return _from_int4pack(weight).float()
    return _from_int4pack(weight.t().contiguous()).t().float()


def _weight_quant_batchmatmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    bias: torch.Tensor | None,
    group: int,
) -> torch.Tensor:
    function = "npu_weight_quant_batchmatmul"
    require_dtype(x, HALVES, function, "x")
    require(x.dim() == 2 and x.numel() > 0, function, "x must have two dimensions and not be empty")
    require_dtype(weight, (torch.int8, torch.int32), function, "weight")
    codes = _codes(weight, x.shape[1])
    require(codes.shape[0] == x.shape[1], function, f"x {list(x.shape)} and weight {list(codes.shape)} do not fit")
    rows, columns = codes.shape
    require(max(rows, columns) <= MOST_SIZE, function, f"K and N must be at most {MOST_SIZE}")
    require(scale.dtype == x.dtype, function, f"antiquant_scale must have the type of x, {x.dtype}, got {scale.dtype}")
    if group:
        require(
            32 <= group <= rows - 1 and group % 32 == 0,
            function,
            f"antiquant_group_size must be a multiple of 32 in 32 .. {rows - 1}, got {group}",
        )
        wanted: tuple[tuple[int, ...], ...] = ((-(-rows // group), columns),)
    else:
        wanted = ((1, columns), (columns,), (1,))
    require(tuple(scale.shape) in wanted, function, f"antiquant_scale must be {wanted}, got {list(scale.shape)}")
    if offset is not None:
        require(
            offset.shape == scale.shape and offset.dtype == x.dtype,
            function,
            "antiquant_offset must be as antiquant_scale",
        )
        codes = codes + _spread(offset, rows, group)
    if bias is not None:
        biased = torch.float32 if x.dtype == torch.bfloat16 else torch.float16
        require_dtype(bias, (biased,), function, "bias")
        shapes = ((1, columns), (columns,))
        fits = tuple(bias.shape) in shapes and bias.is_contiguous()
        require(fits, function, f"bias must be contiguous, one of {shapes}, got {list(bias.shape)}")
    widened = (codes * _spread(scale, rows, group)).to(x.dtype)
    out = x.float() @ widened.float()
    return (out if bias is None else out + bias.float()).to(x.dtype)


def _spread(values: torch.Tensor, rows: int, group: int) -> torch.Tensor:
    return values.float().repeat_interleave(group, dim=0)[:rows] if group else values.float()
