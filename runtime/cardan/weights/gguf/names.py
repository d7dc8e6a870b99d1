"""Hugging Face names of the tensors in a GGUF file, and the row order that some architectures change.

It reads no file; the names follow what the published converters write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

_TOP: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_ATTENTION: Mapping[str, str] = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}

_GATED: Mapping[str, str] = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}

_NORMS_BEFORE: Mapping[str, str] = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}

_NORMS_AFTER: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_NORMS_AROUND: Mapping[str, str] = {
    **_NORMS_AFTER,
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
}

_HEAD_NORMS: Mapping[str, str] = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}

_LAYER: Mapping[str, Mapping[str, str]] = {
    "llama": {**_ATTENTION, **_GATED, **_NORMS_BEFORE},
    "granite": {**_ATTENTION, **_GATED, **_NORMS_BEFORE},
    "qwen2": {**_ATTENTION, **_GATED, **_NORMS_BEFORE},
    "qwen3": {**_ATTENTION, **_GATED, **_NORMS_BEFORE, **_HEAD_NORMS},
    "gemma2": {**_ATTENTION, **_GATED, **_NORMS_AROUND},
    "gemma3": {**_ATTENTION, **_GATED, **_NORMS_AROUND, **_HEAD_NORMS},
    "olmo2": {**_ATTENTION, **_GATED, **_NORMS_AFTER, **_HEAD_NORMS},
    "phi3": {
        **_NORMS_BEFORE,
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    },
}

ARCHITECTURES: tuple[str, ...] = tuple(_LAYER)
"""GGUF architectures whose names are known."""

PERMUTED: frozenset[str] = frozenset({"llama", "granite"})
"""Architectures whose converter interleaves the two halves of each query and key head."""

ROPE_TENSORS: frozenset[str] = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Tensors that belong to the config: factors of the rotary frequencies."""

_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,4})\.([a-z0-9_]+)\.(weight|bias)")
_DERIVED = re.compile(r"blk\.\d{1,5}\.attn_rot_embd\.weight")


def is_derived(name: str) -> bool:
    """Whether a tensor holds nothing that the config does not: old converters wrote rotary frequencies."""
    return _DERIVED.fullmatch(name) is not None


def hugging_face_name(architecture: str, name: str, num_layers: int) -> str | None:
    """The Hugging Face name of a tensor, or None when models of this architecture have no such tensor."""
    if match := _BLOCK.fullmatch(name):
        part = _LAYER[architecture].get(match[2])
        if part is None or int(match[1]) >= num_layers:
            return None
        return f"model.layers.{match[1]}.{part}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_TOP[stem]}.{kind}" if stem in _TOP and kind in ("weight", "bias") else None


def head_of_rows(name: str) -> str | None:
    """``"q"`` or ``"k"`` when the tensor's rows are those of query or key heads, for permuted architectures."""
    if match := _BLOCK.fullmatch(name):
        return {"attn_q": "q", "attn_k": "k"}.get(match[2])
    return None


def unpermuted_rows(num_heads: int, head_dim: int) -> npt.NDArray[np.int64]:
    """For each row in Hugging Face order, the row of the file that holds it: int64 ``[num_heads * head_dim]``.

    The file has rows ``0, d/2, 1, d/2 + 1, …`` of each head, so that neighbours rotate together.
    """
    rows = np.arange(num_heads * head_dim, dtype=np.int64)
    return rows.reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
