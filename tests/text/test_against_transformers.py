"""The recorded ids of SmolLM2 against transformers itself (slow: transformers takes half a minute to read the file).

transformers reads a GGUF's ``smollm`` pre-tokenizer as plain GPT-2, but the model's own tokenizer.json first splits
off each digit (``Digits(individual_digits=True)``). The two differ only where a digit
follows two or more spaces, or a character such as ½ follows one. The
recorded ids are transformers' vocabulary and merges behind the model's own pre-tokenizer.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cardan.text import Tokenizer

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def oracle(smollm2_path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)


@pytest.mark.filterwarnings("ignore")
def test_recorded_ids_are_those_of_transformers(
    oracle: Any, smollm2: Tokenizer, recorded: list[dict[str, Any]]
) -> None:
    digits_after_spaces = re.compile(r"\s\s\d|\s[½²³Ⅷ①]")
    as_read = [entry for entry in recorded if not digits_after_spaces.search(entry["text"])]
    assert len(as_read) > 50
    for entry in as_read:
        assert oracle.encode(entry["text"]) == entry["ids"], entry["text"]

    from tokenizers import pre_tokenizers

    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    for entry in recorded:
        assert oracle.encode(entry["text"]) == entry["ids"], entry["text"]
        for skip in (True, False):
            whole = oracle.decode(entry["ids"], skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert smollm2.decode(entry["ids"], skip_special_tokens=skip) == whole


@pytest.mark.filterwarnings("ignore")
def test_chat_prompts_are_those_of_transformers(oracle: Any, smollm2: Tokenizer) -> None:
    conversations = [
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": '中文 <b> "q"'}],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
    ]
    for messages in conversations:
        for opens in (True, False):
            expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens)
            assert smollm2.render_chat(messages, add_generation_prompt=opens) == expected
