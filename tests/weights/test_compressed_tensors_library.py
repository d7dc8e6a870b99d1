"""What the compressed-tensors library writes is read as the library itself widens it."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # noqa: E402
from compressed_tensors.quantization.utils import calculate_qparams  # noqa: E402
from quantized_checkpoints import Raw, save  # noqa: E402

from cardan.config import ModelConfig  # noqa: E402
from cardan.weights import open_checkpoint  # noqa: E402

ROWS, COLUMNS = 48, 256
LINEAR = "model.layers.0.self_attn.q_proj"

CASES = {
    "int4-group": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 64}),
    "int4-group-asym": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
    "int8-group": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 128}),
    "int8-channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8-tensor": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "float8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "float8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
}


def scales_of(weight, args):
    """Scales and zero points as an observer of least and greatest values gives them."""
    groups = {"group": (ROWS, -1, args.group_size), "channel": (ROWS, 1, COLUMNS), "tensor": (1, 1, ROWS * COLUMNS)}
    parts = weight.reshape(groups[args.strategy])
    scale, zero = calculate_qparams(parts.amin(dim=2), parts.amax(dim=2), args)
    if args.strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    return scale, zero


def as_numpy(tensor):
    if tensor.dtype == torch.bfloat16:
        return Raw(tensor.contiguous().view(torch.uint16).numpy(), "BF16")
    if tensor.dtype == torch.float8_e4m3fn:
        return Raw(tensor.contiguous().view(torch.uint8).numpy(), "F8_E4M3")
    return tensor.contiguous().numpy()


def rounding(args, packed):
    """How far a value may be off: code and zero point times the scale, and their sum, are rounded to float32.

    All three are exact where there is no zero point, or where a scale has at most 16 bits, as the model's type has.
    """
    if args.symmetric or packed["weight_scale"].dtype != torch.float32:
        return 0.0
    return 3 * 2.0**-24 * 2**args.num_bits * packed["weight_scale"].abs().max().item()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_the_library(tmp_path, name, dtype):
    fmt, settings = CASES[name]
    args = QuantizationArgs(**{"symmetric": True, "type": "int", **settings})
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).to(dtype)
    scale, zero = scales_of(weight, args)
    compressor = BaseCompressor.get_value_from_registry(fmt)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    packed = compressor.compress(state, scheme)
    config = {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "quantization_config": config}))
    save(tmp_path / "model.safetensors", {f"{LINEAR}.{key}": as_numpy(part) for key, part in packed.items()})
    checkpoint = open_checkpoint(ModelConfig(model=str(tmp_path)))
    got = checkpoint.dequantize(checkpoint.tensor(f"{LINEAR}.weight"))
    # widened in float64, so that the library rounds nothing
    wide = {**packed, "weight_scale": packed["weight_scale"].double()}
    want = compressor.decompress(wide, scheme)["weight"].double().numpy()
    off = np.abs(got - want.astype(np.float32))
    assert off.max() <= rounding(args, packed)
    assert np.abs(got - weight.float().numpy()).max() < 0.5
    checkpoint.close()
