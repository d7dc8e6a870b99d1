"""Tokenizers from GGUF metadata and from folders: ids, special tokens, ends, and refusals."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from cardan.config import ModelConfig
from cardan.errors import CheckpointError, RequestError, UnsupportedModelError
from cardan.text import Tokenizer, load_tokenizer
from cardan.weights import TokenizerSource as Files
from cardan.weights import open_description


@pytest.mark.model
def test_smollm2_gives_the_recorded_ids_and_texts(smollm2: Tokenizer, recorded: list[dict[str, Any]]) -> None:
    for entry in recorded:
        assert smollm2.encode(entry["text"]) == entry["ids"], entry["text"]
        assert smollm2.decode(entry["ids"], skip_special_tokens=False) == entry["text"]


@pytest.mark.model
def test_a_long_text_holds_up_no_other_thread(smollm2: Tokenizer) -> None:
    """A server's event loop must go on meanwhile; with the interpreter's lock held it would not turn once.

    How often it turns depends on the machine; that it does in the middle, well after the start and before the end,
    does not.
    """
    times_s: list[float] = []

    def encode() -> None:
        times_s.append(time.monotonic())
        smollm2.encode("hello world, " * 60_000)
        times_s.append(time.monotonic())

    encoding = threading.Thread(target=encode)
    encoding.start()
    turns_s = []
    while encoding.is_alive():
        time.sleep(0.001)
        turns_s.append(time.monotonic())
    start_s, end_s = times_s
    quarter_s = (end_s - start_s) / 4
    assert any(start_s + quarter_s < turn_s < end_s - quarter_s for turn_s in turns_s)


@pytest.mark.model
def test_smollm2_special_tokens_and_ends(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_id == 1
    assert smollm2.eos_ids == {2}
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.decode([1, 28120, 2]) == "hello"
    assert smollm2.token_text(2) == "<|im_end|>"
    assert smollm2.token_bytes(216) == b" "
    assert smollm2.token_id("<|im_end|>") == 2
    assert smollm2.token_id("no such token") is None


@pytest.mark.model
def test_ids_outside_the_vocabulary_are_refused_when_decoded_and_empty_when_looked_up(smollm2: Tokenizer) -> None:
    for wrong in (-1, 49152):
        with pytest.raises(RequestError, match=rf"Token ids must be 0 to 49151, got {wrong}\."):
            smollm2.decode([5, wrong])
        assert smollm2.token_bytes(wrong) == b""
        assert smollm2.token_text(wrong) == ""


@pytest.mark.model
def test_half_a_surrogate_pair_is_refused(smollm2: Tokenizer) -> None:
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        smollm2.encode("a\ud800")


def test_the_generation_config_adds_ends(sentencepiece_metadata: Mapping[str, Any]) -> None:
    files = Files(gguf=sentencepiece_metadata)
    assert load_tokenizer(files).eos_ids == {2}
    assert load_tokenizer(files, generation_config={"eos_token_id": [7, 8]}).eos_ids == {2, 7, 8}
    assert load_tokenizer(files, generation_config={"eos_token_id": 7}).eos_ids == {2, 7}


# --- SentencePiece in GGUF ----------------------------------------------------------------------------


def test_sentencepiece_pieces_with_scores_merge_as_the_trained_merges_do(
    sentencepiece_backend: Backend, sentencepiece_metadata: Mapping[str, Any], texts: list[str]
) -> None:
    tokenizer = load_tokenizer(Files(gguf=sentencepiece_metadata))
    longer = ["the tokenizer was with the text, though lazy", "print(range(22))", "the quick  brown   fox"]
    for text in [*texts, *longer]:
        if text:
            ids = tokenizer.encode(text)
            assert ids[0] == 1
            assert ids[1:] == sentencepiece_backend.encode(text, add_special_tokens=False).ids, text
            assert tokenizer.decode(ids) == text


def test_sentencepiece_follows_scores_rather_than_ids(sentencepiece_metadata: Mapping[str, Any]) -> None:
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "bc"]
    metadata = {
        **sentencepiece_metadata,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0, 0, 0, -9, -9, -9, -2.0, -1.0],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
    }
    assert load_tokenizer(Files(gguf=metadata)).encode("abc") == [3, 7]
    gemma = {**metadata, "general.architecture": "gemma2"}
    assert load_tokenizer(Files(gguf=gemma)).encode("abc") == [6, 5]


def test_sentencepiece_without_space_prefix(
    sentencepiece_backend: Backend, sentencepiece_metadata: Mapping[str, Any]
) -> None:
    metadata = {**sentencepiece_metadata, "tokenizer.ggml.add_space_prefix": False}
    tokenizer = load_tokenizer(Files(gguf=metadata))
    plain = load_tokenizer(Files(gguf=sentencepiece_metadata))
    assert tokenizer.encode(" the fox") == plain.encode("the fox")
    assert tokenizer.encode("the fox") != plain.encode("the fox")
    for text in ("the fox", " the fox", "  x"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_bos_and_eos_as_the_file_says(sentencepiece_metadata: Mapping[str, Any]) -> None:
    both = {**sentencepiece_metadata, "tokenizer.ggml.add_eos_token": True}
    ids = load_tokenizer(Files(gguf=both)).encode("fox")
    assert (ids[0], ids[-1]) == (1, 2)
    none = {**sentencepiece_metadata, "tokenizer.ggml.add_bos_token": False}
    assert load_tokenizer(Files(gguf=none)).encode("fox") == ids[1:-1]
    assert load_tokenizer(Files(gguf=both)).encode("fox", add_special_tokens=False) == ids[1:-1]


def test_user_defined_tokens_are_found_whole_and_are_not_special(sentencepiece_metadata: Mapping[str, Any]) -> None:
    metadata = {
        **sentencepiece_metadata,
        "tokenizer.ggml.tokens": [*sentencepiece_metadata["tokenizer.ggml.tokens"], "\n\n", "<think>"],
        "tokenizer.ggml.scores": [*sentencepiece_metadata["tokenizer.ggml.scores"], 0.0, 0.0],
        "tokenizer.ggml.token_type": [*sentencepiece_metadata["tokenizer.ggml.token_type"], 4, 4],
    }
    tokenizer = load_tokenizer(Files(gguf=metadata))
    think = tokenizer.token_id("<think>")
    assert think in tokenizer.encode("a<think>b\n\nc")
    assert tokenizer.token_id("\n\n") in tokenizer.encode("a<think>b\n\nc")
    assert tokenizer.special_ids == {0, 1, 2}
    assert "<think>" in tokenizer.decode(tokenizer.encode("a<think>b"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, r"tokenizer\.ggml\.model is 'rwkv'; 'gpt2' and 'llama' can be read"),
        ({"tokenizer.ggml.tokens": None}, "holds no tokenizer"),
        *[
            ({key: value}, f"{key} is no list of (texts|whole numbers|numbers); it is damaged")
            for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores")
            for value in (5, "x", [None], {})
        ],
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": [5]}, "merges is no list of texts"),
        ({"tokenizer.ggml.bos_token_id": "x"}, "bos_token_id is x, but it has"),
        ({"tokenizer.ggml.eos_token_id": [1]}, r"eos_token_id is \[1\], but it has"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": [1], "tokenizer.ggml.merges": []}, r"pre is '\[1\]'"),
        ({"tokenizer.ggml.token_type": [1]}, r"\d+ tokens but 1 token types"),
        ({"tokenizer.ggml.scores": None}, "but 0 scores"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, r"bos_token_id is 1000000, but it has \d+ tokens"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}, r"without tokenizer\.ggml\.merges"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["ab"]},
            "A merge of the GGUF file's tokenizer is 'ab'; two pieces are expected",
        ),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["q zzz"]},
            "contradicts itself",
        ),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "newfangled", "tokenizer.ggml.merges": []},
            r"tokenizer\.ggml\.pre is 'newfangled'.*pass --tokenizer FOLDER",
        ),
    ],
)
def test_gguf_metadata_that_is_refused(
    sentencepiece_metadata: Mapping[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(Files(gguf={**sentencepiece_metadata, **change}))


@pytest.mark.parametrize("none", [-1, 2**32 - 1])
def test_an_id_that_stands_for_no_token_is_none(sentencepiece_metadata: Mapping[str, Any], none: int) -> None:
    tokenizer = load_tokenizer(Files(gguf={**sentencepiece_metadata, "tokenizer.ggml.bos_token_id": none}))
    assert tokenizer.bos_id is None
    assert 1 not in tokenizer.encode("fox")


# --- byte-level in GGUF against a real tokenizer.json ----------------------------------------------------


def test_qwen2_from_gguf_is_the_tokenizer_of_its_json(qwen3: Tokenizer, texts: list[str]) -> None:
    path = Path(os.environ["CARDAN_TEST_MODELS"]) / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    if not path.is_file():
        pytest.skip(f"{path.name} is not in CARDAN_TEST_MODELS")
    tokenizer = load_tokenizer(open_description(ModelConfig(model=str(path))).tokenizer)
    assert tokenizer.eos_ids == {151645}
    for text in texts:  # both models have the same words; only Qwen3's last few special tokens are newer
        assert tokenizer.encode(text) == qwen3.encode(text), text


# --- folders ---------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small byte-level tokenizer in a folder, with a BOS, an EOS and a token for ends of turns."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 3, trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    return tmp_path


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def test_a_folder_reads_and_round_trips(folder: Path, texts: list[str]) -> None:
    tokenizer = load_tokenizer(Files(folder=folder))
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, {1})
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_special_tokens_map_names_what_the_config_does_not(folder: Path) -> None:
    write(folder / "tokenizer_config.json", {"eos_token": "</s>"})
    write(folder / "special_tokens_map.json", {"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>"})
    tokenizer = load_tokenizer(Files(folder=folder))
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, {1})


def test_generation_config_goes_before_config(folder: Path) -> None:
    write(folder / "config.json", {"eos_token_id": 5})
    assert load_tokenizer(Files(folder=folder)).eos_ids == {1, 5}
    write(folder / "generation_config.json", {"eos_token_id": [6, 7]})
    assert load_tokenizer(Files(folder=folder)).eos_ids == {1, 6, 7}


def test_the_token_that_ends_a_turn_in_the_template_is_an_end(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    assert load_tokenizer(Files(folder=folder)).eos_ids == {1, 2}
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert load_tokenizer(Files(folder=folder)).eos_ids == {1}


def test_add_bos_token_in_the_config_is_followed(folder: Path) -> None:
    assert 0 not in load_tokenizer(Files(folder=folder)).encode("fox")
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    write(folder / "tokenizer_config.json", {**names, "add_bos_token": True, "add_eos_token": True})
    ids = load_tokenizer(Files(folder=folder)).encode("fox")
    assert (ids[0], ids[-1]) == (0, 1)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(folder / "tokenizer.json"))
    write(folder / "tokenizer_config.json", names)
    assert load_tokenizer(Files(folder=folder)).encode("fox")[0] == 0
    write(folder / "tokenizer_config.json", {**names, "add_bos_token": False})
    assert load_tokenizer(Files(folder=folder)).encode("fox") == ids[1:-1]


def test_tokens_that_only_the_config_declares_are_added(folder: Path) -> None:
    size = load_tokenizer(Files(folder=folder)).vocab_size
    declared = {str(size): {"content": "<tool>", "special": False}, str(size + 1): {"content": "<x>", "special": True}}
    write(folder / "tokenizer_config.json", {"eos_token": "</s>", "added_tokens_decoder": declared})
    tokenizer = load_tokenizer(Files(folder=folder))
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.decode(tokenizer.encode("<tool><x>")) == "<tool>"
    write(folder / "tokenizer_config.json", {"added_tokens_decoder": {"9999": {"content": "<tool>"}}})
    with pytest.raises(CheckpointError, match="gives '<tool>' the id 9999"):
        load_tokenizer(Files(folder=folder))


def test_named_tokens_become_special(folder: Path) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([AddedToken("<pad>", special=False)])
    backend.save(str(folder / "tokenizer.json"))
    plain = load_tokenizer(Files(folder=folder))
    assert plain.decode(plain.encode("a<pad>")) == "a<pad>"
    write(folder / "tokenizer_config.json", {"eos_token": "</s>", "additional_special_tokens": ["<pad>"]})
    named = load_tokenizer(Files(folder=folder))
    assert named.decode(named.encode("a<pad>")) == "a"


def test_truncation_and_padding_of_the_file_are_dropped(folder: Path) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(Files(folder=folder))
    text = "zebra zebra zebra zebra"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_folders_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json\. Pass --tokenizer FOLDER"):
        load_tokenizer(Files(folder=tmp_path))
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(CheckpointError, match=r"only a SentencePiece tokenizer\.model, which is not read"):
        load_tokenizer(Files(folder=tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read as a tokenizer"):
        load_tokenizer(Files(folder=tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "must hold a JSON object, got list"),
        ('{"added_tokens_decoder": [1]}', r"has added_tokens_decoder = \[1\], expected an object of token ids and"),
        ('{"added_tokens_decoder": {"x": {"content": "a"}}}', "has added_tokens_decoder = .*, expected an object"),
        ('{"added_tokens_decoder": {"500": "a"}}', "has added_tokens_decoder = .*, expected an object"),
        ('{"additional_special_tokens": 5}', "has additional_special_tokens = 5, expected a list of tokens"),
        ('{"chat_template": 5}', "has chat_template = 5, expected a text or a list of objects with name and template"),
        ('{"chat_template": ["a"]}', "has chat_template = .*, expected a text or a list"),
        ('{"chat_template": [{"name": "a"}]}', "has chat_template = .*, expected a text or a list"),
    ],
    ids=range(10),
)
def test_broken_json_beside_the_tokenizer_is_refused(folder: Path, content: str, message: str) -> None:
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(Files(folder=folder))


@pytest.mark.parametrize("value", ["x", 1.5, True, {}, [[1]], [None]], ids=str)
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_an_end_that_is_no_token_id_is_refused(folder: Path, name: str, value: object) -> None:
    write(folder / name, {"eos_token_id": value})
    with pytest.raises(CheckpointError, match=f"{name} has eos_token_id = .*, expected a token id or a list of them"):
        load_tokenizer(Files(folder=folder))


def test_templates_by_name(folder: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b{{ tools[0].type }}"}]
    write(folder / "chat_template.json", {"chat_template": named})
    tokenizer = load_tokenizer(Files(folder=folder))
    message = {"role": "user", "content": "hi"}
    assert tokenizer.render_chat([message]) == "a"
    assert tokenizer.render_chat([message], tools=[{"type": "function"}]) == "bfunction"


def test_a_template_that_is_no_text_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja is not valid UTF-8"):
        load_tokenizer(Files(folder=folder))


def test_a_decoder_of_another_kind_is_refused(folder: Path) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(UnsupportedModelError, match="decoder is WordPiece"):
        load_tokenizer(Files(folder=folder))


def test_a_source_with_both_or_neither_is_our_own_mistake() -> None:
    for files in (SimpleNamespace(folder=None, gguf=None), SimpleNamespace(folder=Path(), gguf={})):
        with pytest.raises(ValueError, match="one of the two"):
            load_tokenizer(files)


def test_qwen3_reads_as_its_library_file_says(qwen3: Tokenizer, qwen3_folder: Path, texts: list[str]) -> None:
    backend = Backend.from_file(str(qwen3_folder / "tokenizer.json"))
    assert qwen3.vocab_size == 151669
    assert qwen3.eos_ids == {151645}
    assert qwen3.bos_id is None
    for text in texts:
        ids = backend.encode(text).ids
        assert qwen3.encode(text) == ids
        assert qwen3.decode(ids) == backend.decode(ids)
    assert qwen3.decode([151667]) == "<think>"
