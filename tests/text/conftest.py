"""Tokenizers that the text tests share."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, trainers

from cardan.config import ModelConfig
from cardan.text import Tokenizer, load_tokenizer
from cardan.weights import TokenizerSource, open_description

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def recorded() -> list[dict[str, Any]]:
    """Texts with the ids that transformers gives for them; ``test_against_transformers`` says how they were made."""
    return json.loads((DATA / "smollm2_ids.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def texts(recorded: list[dict[str, Any]]) -> list[str]:
    return [entry["text"] for entry in recorded]


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_path: Path) -> Mapping[str, Any]:
    source = open_description(ModelConfig(model=str(smollm2_path))).tokenizer
    assert source.gguf is not None
    return source.gguf


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: Mapping[str, Any]) -> Tokenizer:
    return load_tokenizer(TokenizerSource(gguf=smollm2_metadata))


@pytest.fixture(scope="session")
def qwen3_folder() -> Path:
    root = os.environ.get("CARDAN_TEST_MODELS")
    for name in ("qwen3tok/package/models", "qwen3tok", "Qwen3"):
        folder = Path(root) / name if root else None
        if folder is not None and (folder / "tokenizer.json").is_file():
            return folder
    pytest.skip("no folder qwen3tok with Qwen3's tokenizer.json in CARDAN_TEST_MODELS")


@pytest.fixture(scope="session")
def qwen3(qwen3_folder: Path) -> Tokenizer:
    return load_tokenizer(TokenizerSource(folder=qwen3_folder))


CORPUS = (
    "the quick brown fox jumps over the lazy dog. The dog, though lazy, barks at the fox!",
    "in the beginning there was a tokenizer, and the tokenizer was with text; the text was the tokenizer.",
    "été naïve café — déjà vu, über straße",
    "for i in range(100):\n    print(i, i * 2)\n",
    "numbers 1 22 333 4444 and 3.14159",
)


@pytest.fixture(scope="session")
def sentencepiece_backend() -> Backend:
    """A SentencePiece-like tokenizer, trained here by the library: spaces are ▁, unknown characters are bytes."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    backend.train_from_iterator([line for line in CORPUS for _ in range(3)], trainer)
    trained = json.loads(backend.to_str())
    trained["added_tokens"] = [token for token in trained["added_tokens"] if token["id"] < 3]  # bytes are not special
    return Backend.from_str(json.dumps(trained))


@pytest.fixture(scope="session")
def sentencepiece_metadata(sentencepiece_backend: Backend) -> Mapping[str, Any]:
    """The same vocabulary as a GGUF file of the ``llama`` kind holds it: pieces and scores, no merges."""
    vocabulary = sorted(sentencepiece_backend.get_vocab().items(), key=lambda item: item[1])
    tokens = [text for text, _ in vocabulary]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(index) for index in range(len(tokens))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture(scope="session")
def smollm2_backend(smollm2: Tokenizer) -> Backend:
    """The library's object inside, whose own decoder is the reference for ours."""
    return smollm2._backend
