"""Writes a tiny model folder (config and byte-level tokenizer, no weights) that the null platform can serve.

It knows no platform: the folder is an ordinary one, only without tensors.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from cardan.config import cache_dir

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EOS_ID = 256
"""``<|endoftext|>``."""
IM_START_ID = 257
"""``<|im_start|>``."""
IM_END_ID = 258
"""``<|im_end|>``, which ends a turn and is the config's end of sequence."""
VOCAB_SIZE = 260
"""256 bytes, three special tokens, and one id that no text has."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte.

    Source: GPT-2's byte-to-unicode table (Radford et al., 2019): printable Latin-1 stands for itself, the rest
    counts up from 256.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (byte for byte in range(256) if byte not in printable)
    shifted = {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [shifted.get(byte, chr(byte)) for byte in range(256)]


def tiny_tokenizer() -> Tokenizer:
    """A tokenizer whose ids ``0 .. 255`` are the bytes themselves, with ChatML's special tokens after them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # Split into words, as real tokenizers do: the library keeps up to 10,000, which must not be whole prompts.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def write_tiny_model(folder: Path, context_length: int = 4096) -> Path:
    """Write ``config.json``, ``generation_config.json`` and the tokenizer's files; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": context_length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "dtype": "float32",
        "eos_token_id": IM_END_ID,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    files = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": [IM_END_ID]},
        "tokenizer_config.json": tokenizer_config,
    }
    for name, content in files.items():
        _write_whole(folder / name, json.dumps(content, indent=2) + "\n")
    _write_whole(folder / "tokenizer.json", tiny_tokenizer().to_str(pretty=True))
    return folder


def _write_whole(path: Path, text: str) -> None:
    """Write a file in one move: other processes may be reading it."""
    written = path.with_name(f".{path.name}.{os.getpid()}")
    written.write_text(text, encoding="utf-8")
    written.replace(path)


def null_model_folder() -> Path:
    """The tiny model in Cardan's cache folder, written when it is not there: what ``--model null`` means."""
    return write_tiny_model(cache_dir() / "null")
