"""The tiny model folder is an ordinary one: transformers reads its tokenizer, and ids are bytes."""

from __future__ import annotations

import json

import pytest

from cardan.models import build_model
from cardan.testing import null_model_folder, write_tiny_model
from cardan.testing.tiny_model import EOS_ID, IM_END_ID, IM_START_ID, VOCAB_SIZE, tiny_tokenizer


def test_ids_are_bytes():
    tokenizer = tiny_tokenizer()
    text = "Hé, \n€ 🙂\x00\x7f"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert [tokenizer.encode(word).ids for word in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [
        [EOS_ID],
        [IM_START_ID],
        [IM_END_ID],
    ]


@pytest.mark.filterwarnings("ignore")
def test_transformers_reads_it_the_same_way(tmp_path):
    import transformers

    reference = transformers.AutoTokenizer.from_pretrained(write_tiny_model(tmp_path / "tiny"))
    text = "Grüße <|im_end|> 123"
    assert reference.encode(text, add_special_tokens=False) == tiny_tokenizer().encode(text).ids
    messages = [{"role": "user", "content": "hi"}]
    rendered = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_its_config_builds_a_model(tmp_path):
    config = json.loads((write_tiny_model(tmp_path / "tiny", 512) / "config.json").read_text())
    facts = build_model(config, "tiny", None).facts
    assert (facts.vocab_size, facts.context_length) == (VOCAB_SIZE, 512)


def test_the_null_model_lies_in_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CARDAN_CACHE", str(tmp_path))
    assert null_model_folder() == tmp_path / "null"
    assert (tmp_path / "null" / "tokenizer.json").is_file()
