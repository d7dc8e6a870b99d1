"""Tiny Llama checkpoints quantized by each method, written from the descriptions of the formats, bit by bit.

``write(folder, method)`` gives the float64 values that every tensor means. It knows nothing of Cardan: packing is by
loops over bits, rounding by tables.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, WIDE, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 128, 256, 4, 2, 32, 96, 2
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int8": "I8",
    "uint8": "U8",
}


@dataclass(frozen=True)
class Raw:
    """A tensor of a type that numpy lacks: its bits, and what safetensors calls it."""

    bits: np.ndarray
    dtype: str


Tensors = dict[str, Any]
"""Arrays and ``Raw`` tensors by what follows the module's name."""
Quantize = Callable[[np.ndarray, np.random.Generator], tuple[Tensors, np.ndarray]]
"""Tensors of a linear with float32 weights ``[out, in]``, and the float64 values that they mean."""


@dataclass(frozen=True)
class Method:
    """One way to quantize.

    Attributes:
        config: what ``quantization_config`` says.
        quantize: a linear.
        left_out: modules that stay dense.
        file: in which the config is written instead.
    """

    config: Mapping[str, Any]
    quantize: Quantize
    left_out: tuple[str, ...] = ("lm_head",)
    file: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


# --- numbers -------------------------------------------------------------------------------------


def bf16(values: np.ndarray) -> Raw:
    """Rounded towards zero: which values exactly does not matter, only that the bits mean them."""
    return Raw((np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16), "BF16")


def bf16_values(raw: Raw) -> np.ndarray:
    return (raw.bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def e4m3_values() -> np.ndarray:
    """Values of the 256 codes, from the definition: 1.4.3 bits, bias 7, no infinities, NaN at 0x7f and 0xff."""
    values = []
    for code in range(256):
        sign, exponent, fraction = -1.0 if code >> 7 else 1.0, code >> 3 & 15, code & 7
        if exponent == 15 and fraction == 7:
            values.append(np.nan)
        elif exponent == 0:
            values.append(sign * fraction / 8 * 2.0**-6)
        else:
            values.append(sign * (1 + fraction / 8) * 2.0 ** (exponent - 7))
    return np.array(values)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Index of the entry of a table that is nearest to each value."""
    usable = np.where(np.isfinite(table), table, np.inf)
    order = np.argsort(usable)
    order = order[np.isfinite(usable[order])]
    ordered = usable[order]
    at = np.clip(np.searchsorted(ordered, values), 1, len(ordered) - 1)
    left = np.abs(values - ordered[at - 1]) <= np.abs(ordered[at] - values)
    return order[np.where(left, at - 1, at)]


def pack_words(codes: np.ndarray, bits: int, places: tuple[int, ...] | None = None) -> np.ndarray:
    """int32 words of codes along the last axis; ``places`` says which of its codes each position of a word holds."""
    count = 32 // bits
    words = np.zeros((*codes.shape[:-1], codes.shape[-1] // count), np.uint32)
    for position in range(count):
        column = position if places is None else places[position]
        words |= codes[..., column::count].astype(np.uint32) << np.uint32(position * bits)
    return words.view(np.int32)


def integers(weight: np.ndarray, bits: int, group: int, symmetric: bool) -> tuple[np.ndarray, ...]:
    """Codes ``[out, in]``, float16 scales and whole zero points ``[out, groups]`` of a weight."""
    rows, columns = weight.shape
    parts = weight.reshape(rows, columns // group, group).astype(np.float64)
    top = 2**bits - 1
    if symmetric:
        scales = (np.abs(parts).max(axis=2) / (top // 2)).astype(np.float16)
        zeros = np.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = np.minimum(parts.min(axis=2), 0), np.maximum(parts.max(axis=2), 0)
        scales = ((high - low) / top).astype(np.float16)
        zeros = np.clip(np.rint(-low / scales), 0, top).astype(int)
    codes = np.clip(np.rint(parts / scales[..., None]) + zeros[..., None], 0, top).astype(int)
    return codes.reshape(rows, columns), scales, zeros


def meant(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, index: np.ndarray) -> np.ndarray:
    """``scale * (code - zero)`` in float64, ``index`` being the group of each column."""
    return scales.astype(np.float64)[:, index] * (codes - zeros[:, index])


# --- methods -------------------------------------------------------------------------------------

AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(group: int) -> Quantize:
    def quantize(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        codes, scales, zeros = integers(weight, 4, group, symmetric=False)
        tensors = {
            ".qweight": pack_words(codes.T, 4, AWQ_PLACES),
            ".qzeros": pack_words(zeros.T, 4, AWQ_PLACES),
            ".scales": scales.T,
        }
        return tensors, meant(codes, scales, zeros, np.arange(weight.shape[1]) // group)

    return quantize


def gptq(bits: int, group: int, *, symmetric: bool, act_order: bool = False, version: int = 1) -> Quantize:
    def quantize(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        order = rng.permutation(columns) if act_order else np.arange(columns)
        sorted_codes, scales, zeros = integers(weight[:, order], bits, size, symmetric)
        codes, index = np.empty_like(sorted_codes), np.empty(columns, np.int32)
        codes[:, order] = sorted_codes
        index[order] = np.arange(columns) // size
        stored = zeros - 1 & 2**bits - 1 if version == 1 else zeros
        tensors = {
            ".qweight": pack_words(codes, bits).T,
            ".qzeros": pack_words(stored.T, bits),
            ".scales": scales.T,
            ".g_idx": index,
        }
        return tensors, meant(codes, scales, zeros, index)

    return quantize


def float8(block: tuple[int, int] | None, *, name: str, rows: bool = False, halves: bool = False) -> Quantize:
    """E4M3 codes with a scale for each block, for each row, or for all, in float32 or bfloat16."""

    def quantize(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        out, columns = weight.shape
        tall, wide = block or ((1, columns) if rows else (out, columns))
        scales = np.zeros((-(-out // tall), -(-columns // wide)), np.float32)
        for i, j in np.ndindex(*scales.shape):
            scales[i, j] = np.abs(weight[i * tall : (i + 1) * tall, j * wide : (j + 1) * wide]).max() / 448
        stored: Any = bf16(scales) if halves else scales
        values = bf16_values(stored) if halves else scales.astype(np.float64)
        spread = values.repeat(tall, axis=0)[:out].repeat(wide, axis=1)[:, :columns]
        codes = nearest(weight / spread, e4m3_values()).astype(np.uint8)
        if block is None and not rows and not halves:
            stored = scales.reshape(())
        tensors = {".weight": Raw(codes, "F8_E4M3"), name: stored}
        return tensors, e4m3_values()[codes] * spread

    return quantize


def packed(bits: int, group: int, *, symmetric: bool, act_order: bool = False) -> Quantize:
    """compressed-tensors' packed integers: codes and zero points are stored with half the range added."""

    def quantize(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        order = rng.permutation(columns) if act_order else np.arange(columns)
        sorted_codes, scales, zeros = integers(weight[:, order], bits, size, symmetric)
        codes, index = np.empty_like(sorted_codes), np.empty(columns, np.int32)
        codes[:, order] = sorted_codes
        index[order] = np.arange(columns) // size
        tensors: Tensors = {
            ".weight_packed": pack_words(codes, bits),
            ".weight_scale": scales,
            ".weight_shape": np.array(weight.shape, np.int64),
        }
        if not symmetric:
            tensors[".weight_zero_point"] = pack_words(zeros.T, bits).T
        if act_order:
            tensors[".weight_g_idx"] = index
        return tensors, meant(codes, scales, zeros, index)

    return quantize


def signed_bytes() -> Quantize:
    """int8 codes with a bfloat16 scale for each row."""

    def quantize(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        scales = bf16(np.abs(weight).max(axis=1, keepdims=True) / 127 * 1.01)
        codes = np.clip(np.rint(weight / bf16_values(scales)), -127, 127).astype(np.int8)
        return {".weight": codes, ".weight_scale": scales}, codes * bf16_values(scales)

    return quantize


def mxfp4(codes_name: str, scales_name: str, *, grouped: bool) -> Quantize:
    def quantize(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        rows, columns = weight.shape
        parts = weight.reshape(rows, columns // 32, 32).astype(np.float64)
        exponent = np.floor(np.log2(np.abs(parts).max(axis=2))).astype(int) - 2
        codes = nearest(parts / 2.0 ** exponent[..., None], E2M1).astype(np.uint8)
        pairs = codes[..., ::2] | codes[..., 1::2] << 4
        stored = pairs if grouped else pairs.reshape(rows, -1)
        tensors = {codes_name: stored, scales_name: (exponent + 127).astype(np.uint8)}
        return tensors, (E2M1[codes] * 2.0 ** exponent[..., None]).reshape(rows, columns)

    return quantize


def _compressed(fmt: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "ignore": ["lm_head", "re:.*layers\\.1\\.mlp\\.down_proj"],
        "config_groups": {"group_0": group},
    }


def _gptq(bits: int, group: int, **changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True, **changes}


_SOME_DENSE = ("lm_head", "layers.1.mlp.down_proj")
_INT = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}

METHODS: dict[str, Method] = {
    **{
        f"awq-{group}": Method(
            {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group, "zero_point": True,
             "modules_to_not_convert": ["layers.1.mlp.down_proj"]}, awq(group), _SOME_DENSE,
        )
        for group in (32, 64, 128)
    },
    **{
        f"gptq{bits}-{group}-{'sym' if symmetric else 'asym'}": Method(
            _gptq(bits, group, sym=symmetric), gptq(bits, group, symmetric=symmetric)
        )
        for bits in (4, 8)
        for group, symmetric in ((32, True), (64, False), (128, True), (128, False), (-1, True))
    },
    "gptq4-act-order": Method(
        _gptq(4, 32, desc_act=True), gptq(4, 32, symmetric=True, act_order=True)
    ),
    "gptq8-act-order-asym": Method(
        _gptq(8, 64, desc_act=True, sym=False), gptq(8, 64, symmetric=False, act_order=True)
    ),
    "gptq4-v2": Method(
        _gptq(4, 32, sym=False, checkpoint_format="gptq_v2"), gptq(4, 32, symmetric=False, version=2)
    ),
    "gptq4-older-file": Method(
        {"bits": 4, "group_size": 32, "desc_act": False, "sym": False}, gptq(4, 32, symmetric=False),
        file="quantize_config.json",
    ),
    "fp8-blocks": Method(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
         "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.down_proj"]},
        float8((128, 128), name=".weight_scale_inv"), _SOME_DENSE,
    ),
    "fp8-blocks-bf16": Method(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        float8((128, 128), name=".weight_scale_inv", halves=True),
    ),
    "fp8-small-blocks": Method(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 32]},
        float8((48, 32), name=".weight_scale_inv"),
    ),
    "fp8-tensor-static": Method(
        {"quant_method": "fp8", "activation_scheme": "static"}, float8(None, name=".weight_scale"),
        extra={".input_scale": np.array(0.5, np.float32)},
    ),
    "ct-fp8-rows": Method(
        _compressed("float-quantized", {**_FLOAT, "strategy": "channel"},
                    {**_FLOAT, "strategy": "token", "dynamic": True}),
        float8(None, name=".weight_scale", rows=True, halves=True), _SOME_DENSE,
    ),
    "ct-fp8-tensor": Method(
        _compressed("float-quantized", {**_FLOAT, "strategy": "tensor"}), float8(None, name=".weight_scale"),
        _SOME_DENSE,
    ),
    "ct-fp8-blocks": Method(
        _compressed("float-quantized", {**_FLOAT, "strategy": "block", "block_structure": [128, 128]}),
        float8((128, 128), name=".weight_scale"), _SOME_DENSE,
    ),
    "ct-int4": Method(_compressed("pack-quantized", _INT), packed(4, 32, symmetric=True), _SOME_DENSE),
    "ct-int4-asym": Method(
        _compressed("pack-quantized", {**_INT, "symmetric": False, "group_size": 128}),
        packed(4, 128, symmetric=False), _SOME_DENSE,
    ),
    "ct-int8-act-order": Method(
        _compressed("pack-quantized", {**_INT, "num_bits": 8, "group_size": 64, "actorder": "group"}),
        packed(8, 64, symmetric=True, act_order=True), _SOME_DENSE,
    ),
    "ct-int4-rows": Method(
        _compressed("pack-quantized", {**_INT, "strategy": "channel", "group_size": None}),
        packed(4, -1, symmetric=True), _SOME_DENSE,
    ),
    "ct-w8a8": Method(
        _compressed("int-quantized", {**_INT, "num_bits": 8, "strategy": "channel", "group_size": None}, _TOKEN),
        signed_bytes(), _SOME_DENSE,
    ),
    "ct-int8-weights": Method(
        _compressed("int-quantized", {**_INT, "num_bits": 8, "strategy": "channel", "group_size": None}),
        signed_bytes(), _SOME_DENSE,
    ),
    "ct-mxfp4": Method(
        _compressed("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group",
                                             "group_size": 32}),
        mxfp4(".weight_packed", ".weight_scale", grouped=False), _SOME_DENSE,
    ),
    "mxfp4": Method(
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.1.mlp.down_proj"]},
        mxfp4(".weight_blocks", ".weight_scales", grouped=True), _SOME_DENSE,
    ),
}  # fmt: skip
"""Every method with the settings that change how tensors look."""


# --- checkpoints ---------------------------------------------------------------------------------


def shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the model."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        base = f"model.layers.{layer}."
        for name, shape in (
            ("self_attn.q_proj", (HEADS * HEAD_DIM, HIDDEN)),
            ("self_attn.k_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
            ("self_attn.v_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
            ("self_attn.o_proj", (HIDDEN, HEADS * HEAD_DIM)),
            ("mlp.gate_proj", (WIDE, HIDDEN)),
            ("mlp.up_proj", (WIDE, HIDDEN)),
            ("mlp.down_proj", (HIDDEN, WIDE)),
            ("input_layernorm", (HIDDEN,)),
            ("post_attention_layernorm", (HIDDEN,)),
        ):
            found[f"{base}{name}.weight"] = shape
    return {**found, "lm_head.weight": (VOCAB, HIDDEN)}


def write(folder: Path, method: Method, seed: int = 0) -> dict[str, np.ndarray]:
    """Write a checkpoint; returns the float64 values of its tensors by the names of a dense one."""
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    values: dict[str, np.ndarray] = {}
    for name, shape in shapes().items():
        drawn = rng.normal(size=shape).astype(np.float32)
        if len(shape) == 1:
            drawn = 1 + 0.1 * drawn
        else:
            drawn *= np.float32(0.5 if "embed" in name else 1.5 / shape[-1] ** 0.5)
        module = name.removesuffix(".weight")
        linear = len(shape) == 2 and "embed" not in name
        if not linear or any(part in module for part in method.left_out):
            tensors[name], values[name] = drawn, drawn.astype(np.float64)
            continue
        parts, values[name] = method.quantize(drawn, rng)
        tensors |= {module + suffix: part for suffix, part in {**parts, **method.extra}.items()}
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(CONFIG)
    if method.file is None:
        config["quantization_config"] = dict(method.config)
    else:
        (folder / method.file).write_text(json.dumps(dict(method.config)))
    (folder / "config.json").write_text(json.dumps(config))
    save(folder / "model.safetensors", tensors)
    return values


def write_dense(folder: Path, values: Mapping[str, np.ndarray]) -> Path:
    """The same model with its weights as float32."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save(folder / "model.safetensors", {name: value.astype(np.float32) for name, value in values.items()})
    return folder


def save(path: Path, tensors: Tensors) -> None:
    """A safetensors file, by its description: a header in JSON after its length, then the bytes."""
    header, body, at = {}, [], 0
    for name, tensor in tensors.items():
        array = np.ascontiguousarray(tensor.bits if isinstance(tensor, Raw) else tensor)
        dtype = tensor.dtype if isinstance(tensor, Raw) else DTYPES[array.dtype.name]
        shape = list(np.shape(tensor.bits if isinstance(tensor, Raw) else tensor))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + array.nbytes]}
        body.append(array.tobytes())
        at += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(body))
