"""Tiny checkpoints of every kind, written by the packages that define the formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 48, 64, 4, 2, 16, 96, 2

COMMON = {
    "block_count": LAYERS,
    "context_length": 256,
    "embedding_length": HIDDEN,
    "feed_forward_length": FFN,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": HEAD_DIM,
    "rope.freq_base": 50000.0,
}

SEPARATE = {
    "attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_gate.weight": (FFN, HIDDEN),
    "ffn_up.weight": (FFN, HIDDEN),
    "ffn_down.weight": (HIDDEN, FFN),
}
BEFORE = {"attn_norm.weight": (HIDDEN,), "ffn_norm.weight": (HIDDEN,)}
AFTER = {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
HEAD_NORMS = {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
FULL_NORMS = {"attn_q_norm.weight": (HEADS * HEAD_DIM,), "attn_k_norm.weight": (KV_HEADS * HEAD_DIM,)}
BIASES = {
    "attn_q.bias": (HEADS * HEAD_DIM,),
    "attn_k.bias": (KV_HEADS * HEAD_DIM,),
    "attn_v.bias": (KV_HEADS * HEAD_DIM,),
}

BLOCKS: dict[str, dict[str, tuple[int, ...]]] = {
    "llama": {**SEPARATE, **BEFORE},
    "granite": {**SEPARATE, **BEFORE},
    "qwen2": {**SEPARATE, **BEFORE, **BIASES},
    "qwen3": {**SEPARATE, **BEFORE, **HEAD_NORMS},
    "gemma2": {**SEPARATE, **BEFORE, **AFTER},
    "gemma3": {**SEPARATE, **BEFORE, **AFTER, **HEAD_NORMS},
    "olmo2": {**SEPARATE, **AFTER, **FULL_NORMS},
    "phi3": {
        **BEFORE,
        "attn_qkv.weight": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
        "attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
        "ffn_up.weight": (2 * FFN, HIDDEN),
        "ffn_down.weight": (HIDDEN, FFN),
    },
}
EXTRA: dict[str, dict[str, Any]] = {
    "gemma2": {"attention.sliding_window": 32, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": {"attention.sliding_window": 32},
    "phi3": {"attention.sliding_window": 128, "rope.scaling.original_context_length": 256},
    "granite": {
        "attention.scale": 0.015625,
        "embedding_scale": 12.0,
        "residual_scale": 0.22,
        "logit_scale": 8.0,
    },
}
TOKENS = [f"t{index}" for index in range(VOCAB)]


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def write_gguf_file(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[np.ndarray, str]],
) -> Path:
    """Write tensors, given as float32 values and the name of a format, with the gguf package."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add_value(writer, key, value)
    for name, (values, fmt) in tensors.items():
        kind = gguf.GGMLQuantizationType[fmt]
        data = values if fmt == "F32" else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_tensors(architecture: str, fmt: str, tied: bool) -> dict[str, tuple[np.ndarray, str]]:
    """Random tensors of a tiny model by their GGUF names; vectors are F32."""
    rng = np.random.default_rng(11)
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in BLOCKS[architecture].items()}
    return {
        name: (rng.standard_normal(shape).astype(np.float32), fmt if len(shape) == 2 else "F32")
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="session")
def smollm2_reader(smollm2_path: Path) -> gguf.GGUFReader:
    """The gguf package's view of the bundled model: it takes seconds and half a gigabyte, so once is enough."""
    return gguf.GGUFReader(smollm2_path)


@pytest.fixture
def write_gguf() -> Callable[..., Path]:
    """``write_gguf_file``, for files that need not be models."""
    return write_gguf_file


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Write a tiny model: ``tiny_gguf("llama", fmt="Q8_0", tied=True, change={key: value or None}, tensors={…})``."""

    def write(
        architecture: str,
        *,
        fmt: str = "Q8_0",
        tied: bool = True,
        change: Mapping[str, Any] | None = None,
        tensors: Mapping[str, tuple[np.ndarray, str] | None] | None = None,
        name: str = "tiny.gguf",
    ) -> Path:
        own = {f"{architecture}.{key}": value for key, value in {**COMMON, **EXTRA.get(architecture, {})}.items()}
        metadata = own | {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.tokens": TOKENS,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            **(change or {}),
        }
        all_tensors = tiny_tensors(architecture, fmt, tied) | dict(tensors or {})
        return write_gguf_file(
            tmp_path / name,
            architecture,
            {key: value for key, value in metadata.items() if value is not None},
            {key: value for key, value in all_tensors.items() if value is not None},
        )

    return write


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    """A folder with config, tokenizer and one safetensors file of two tensors."""
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    (folder / "tokenizer.json").write_text("{}")
    tensors = {
        "model.embed_tokens.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "model.norm.weight": np.ones(4, dtype=np.float16),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
