"""Where each named pre-tokenizer cuts, against the library's own steps and the published patterns."""

from __future__ import annotations

import pytest
from tokenizers import Regex, pre_tokenizers

from cardan.text.pretokenizers import pre_tokenizer_for

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

# As the models' own tokenizer.json files write them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), BYTES])


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
EXPECTED = {
    "gpt-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "llama-bpe": split(LLAMA3),
    "qwen2": split(QWEN2),
    "tekken": split(TEKKEN),
    "gpt-4o": split(GPT4O),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_cuts_are_those_of_the_published_pre_tokenizer(name: str, texts: list[str]) -> None:
    ours = pre_tokenizer_for(name).pre_tokenizer()
    for text in [*texts, "It'S 12345 HTTPServer/path//\n\n x"]:
        expected = [piece for piece, _ in EXPECTED[name].pre_tokenize_str(text)]
        assert [piece for piece, _ in ours.pre_tokenize_str(text)] == expected, text


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("deepseek-v3", ["中文", " abc", "123", "4", ".\n"]),
        ("deepseek-coder", ["中文", " abc", "1", "2", "3", "4", ".", "\n"]),
        ("falcon", ["中文", " abc", "123", "4", ".", "\n"]),
    ],
)
def test_pieces_of_the_sequence_kinds(name: str, pieces: list[str]) -> None:
    text = "中文 abc1234.\n"
    spans = [span for _, span in pre_tokenizer_for(name).pre_tokenizer().pre_tokenize_str(text)]
    assert [text[start:end] for start, end in spans] == pieces


def test_families() -> None:
    assert pre_tokenizer_for("llama-bpe").ignore_merges
    assert pre_tokenizer_for("llama-bpe").adds_bos
    assert pre_tokenizer_for("tekken").adds_bos
    assert not pre_tokenizer_for("smollm").adds_bos
    assert pre_tokenizer_for("qwen2").normalizer() is not None
    assert pre_tokenizer_for("smollm").normalizer() is None
    assert pre_tokenizer_for(None) == pre_tokenizer_for("default")


def test_the_default_cuts_punctuation_and_groups_of_three_digits() -> None:
    text = "a.b 12345,x"
    spans = [span for _, span in pre_tokenizer_for(None).pre_tokenizer().pre_tokenize_str(text)]
    assert [text[start:end] for start, end in spans] == ["a", ".", "b", " ", "123", "45", ",", "x"]
