"""What a user can pass as a model, and what is refused with a reason."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cardan.config import ModelConfig
from cardan.errors import CheckpointError, ConfigError, ModelError, ModelNotFoundError
from cardan.platform import Checkpoint
from cardan.weights import OpenedCheckpoint, open_checkpoint, open_description


def open_model(model: Path | str, **options: object) -> OpenedCheckpoint:
    return open_checkpoint(ModelConfig(model=str(model), **options))


def test_a_folder_is_opened(tiny_folder: Path) -> None:
    checkpoint: Checkpoint = open_model(tiny_folder)
    opened = open_model(tiny_folder)
    assert checkpoint.config["model_type"] == "llama"
    assert (opened.path, opened.name) == (tiny_folder, "tiny-model")
    assert opened.tokenizer.folder == tiny_folder
    assert opened.tokenizer.gguf is None
    assert opened.generation_config == {"eos_token_id": [2, 3]}
    assert opened.tensor_info()["model.norm.weight"] == ("F16", (4,))
    np.testing.assert_array_equal(
        checkpoint.dequantize(checkpoint.tensor("model.embed_tokens.weight")), np.arange(12).reshape(3, 4)
    )
    checkpoint.close()


def test_a_relative_folder_has_a_name(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_folder)
    assert open_model(".").name == "tiny-model"


def test_a_home_folder_is_expanded(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tiny_folder.parent))
    assert open_model("~/tiny-model").name == "tiny-model"


def test_a_safetensors_file_uses_the_config_beside_it(tiny_folder: Path) -> None:
    (tiny_folder / "generation_config.json").unlink()
    checkpoint = open_model(tiny_folder / "model.safetensors")
    assert checkpoint.config["hidden_size"] == 4
    assert checkpoint.generation_config == {}
    assert checkpoint.tokenizer.folder == tiny_folder


def test_the_only_safetensors_file_of_a_folder_is_taken(tiny_folder: Path) -> None:
    (tiny_folder / "model.safetensors").rename(tiny_folder / "weights.safetensors")
    assert len(open_model(tiny_folder).tensor_info()) == 2


def test_a_gguf_file_is_opened(tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf("llama", name="my-model.gguf")
    checkpoint = open_model(path)
    assert (checkpoint.path, checkpoint.name) == (path, "my-model")
    assert checkpoint.tokenizer.folder is None
    assert checkpoint.tokenizer.gguf is not None
    assert checkpoint.tokenizer.gguf["tokenizer.ggml.tokens"][:2] == ["t0", "t1"]
    assert checkpoint.generation_config == {}


def test_a_folder_with_one_gguf_file_is_opened(tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf("llama")
    (path.parent / "mmproj-model.gguf").write_bytes(b"GGUF")
    assert open_model(path.parent).path == path


def test_a_gguf_file_without_a_tokenizer_uses_the_folder(tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf("llama", change={"tokenizer.ggml.tokens": None})
    assert open_model(path.parent).tokenizer.folder == path.parent


def test_safetensors_are_preferred_in_a_folder_that_has_both(tiny_folder: Path, tiny_gguf: Callable[..., Path]) -> None:
    tiny_gguf("llama").rename(tiny_folder / "also.gguf")
    assert open_model(tiny_folder).config["hidden_size"] == 4


# --- tokenizers ---------------------------------------------------------------------------------


def test_another_tokenizer_is_taken_from_a_folder(tiny_folder: Path, tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf("llama")
    assert open_model(path, tokenizer=str(tiny_folder)).tokenizer.folder == tiny_folder
    assert open_model(path, tokenizer=str(tiny_folder / "tokenizer.json")).tokenizer.folder == tiny_folder
    assert open_description(ModelConfig(model=str(path), tokenizer=str(tiny_folder))).tokenizer.folder == tiny_folder


def test_another_tokenizer_is_taken_from_a_gguf_file(tiny_folder: Path, tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf("llama")
    for tokenizer in (path, path.parent):
        source = open_model(tiny_folder, tokenizer=str(tokenizer)).tokenizer
        assert source.gguf is not None
        assert source.gguf["tokenizer.ggml.eos_token_id"] == 2


def test_a_tokenizer_that_is_none_is_refused(tiny_folder: Path, tmp_path: Path, tiny_gguf: Callable[..., Path]) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(
        CheckpointError, match=r"--tokenizer .*nothing has none of tokenizer.json, .* nor a single GGUF"
    ):
        open_model(tiny_folder, tokenizer=str(tmp_path / "nothing"))
    with pytest.raises(ModelNotFoundError, match="--tokenizer /no/such: there is no such file or folder"):
        open_model(tiny_folder, tokenizer="/no/such")
    bare = tiny_gguf("llama", change={"tokenizer.ggml.tokens": None})
    with pytest.raises(CheckpointError, match=r"has no tokenizer: its metadata lacks tokenizer.ggml.tokens"):
        open_model(tiny_folder, tokenizer=str(bare))


# --- descriptions -------------------------------------------------------------------------------


def test_a_description_needs_no_weights(tiny_folder: Path) -> None:
    (tiny_folder / "model.safetensors").unlink()
    description = open_description(ModelConfig(model=str(tiny_folder)))
    assert description.config["hidden_size"] == 4
    assert description.tokenizer.folder == tiny_folder
    assert description.generation_config == {"eos_token_id": [2, 3]}


def test_random_weights_leave_only_the_description(tiny_folder: Path, tiny_gguf: Callable[..., Path]) -> None:
    (tiny_folder / "model.safetensors").unlink()
    for model in (tiny_folder, tiny_gguf("llama")):
        checkpoint = open_model(model, random_weights=3)
        assert list(checkpoint.names()) == []
        assert checkpoint.config["model_type"] == "llama"
        with pytest.raises(CheckpointError, match=r"has no tensor 'model.norm.weight' among its 0"):
            checkpoint.tensor("model.norm.weight")


def test_a_description_of_a_single_file(tiny_folder: Path) -> None:
    assert open_description(ModelConfig(model=str(tiny_folder / "model.safetensors"))).config["hidden_size"] == 4


# --- refused ------------------------------------------------------------------------------------


def refuse(model: Path | str, message: str, error: type[ModelError] = CheckpointError) -> None:
    with pytest.raises(error, match=message):
        open_model(model)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt", "weights.pkl"])
def test_pickles_are_refused_unopened(tiny_folder: Path, name: str) -> None:
    (tiny_folder / "model.safetensors").unlink()
    (tiny_folder / name).write_bytes(pickle.dumps({"a": 1}))
    refuse(tiny_folder, rf"has its weights in pickles only \({name}\).*never does\. Convert it to safetensors")
    refuse(tiny_folder / name, "is a pickle by its name. Loading a pickle can run any code")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    refuse(tmp_path, r"is no model: it is empty\. Expected config.json with \*\.safetensors, or one \*\.gguf file")


def test_a_folder_of_other_things_is_refused(tmp_path: Path) -> None:
    for name in "abcdef":
        (tmp_path / name).touch()
    refuse(tmp_path, r"is no model: it has a, b, c, d, e …\.")


def test_a_folder_without_weights_is_refused(tiny_folder: Path) -> None:
    (tiny_folder / "model.safetensors").unlink()
    refuse(tiny_folder, r"has a config.json but no weights: .* or pass --random-weights SEED")


def test_an_adapter_is_refused(tiny_folder: Path) -> None:
    (tiny_folder / "model.safetensors").unlink()
    (tiny_folder / "adapter_config.json").write_text("{}")
    refuse(tiny_folder, r"is an adapter, not a model\. Merge it into its base model")


def test_weights_without_a_config_are_refused(tiny_folder: Path) -> None:
    (tiny_folder / "config.json").unlink()
    refuse(tiny_folder, r"has safetensors but no config.json, which says what model they are")
    refuse(tiny_folder / "model.safetensors", "has safetensors but no config.json")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_json_is_refused(tiny_folder: Path, name: str) -> None:
    (tiny_folder / name).write_text('{"a": 1,\n  oops}')
    refuse(tiny_folder, rf"{name} is no valid JSON: .* at line 2, column 3\. Fetch it again")
    (tiny_folder / name).write_text("[]")
    refuse(tiny_folder, f"{name} must hold a JSON object, got list")


def test_several_gguf_files_are_listed(tiny_gguf: Callable[..., Path]) -> None:
    folder = tiny_gguf("llama", name="a-Q4_0.gguf").parent
    tiny_gguf("llama", name="b-Q8_0.gguf")
    refuse(folder, r"has 2 GGUF files \(a-Q4_0.gguf, b-Q8_0.gguf\)\. Pass one of them\.")


def test_parts_of_a_split_gguf_file_are_to_be_merged(tmp_path: Path) -> None:
    for part in (1, 2):
        (tmp_path / f"x-0000{part}-of-00002.gguf").write_bytes(b"GGUF")
    refuse(tmp_path, r"has 2 GGUF files .*\. Merge the parts of a split file first\.")


def test_a_file_of_another_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\x08\x07onnx data")
    refuse(path, r"model.onnx is of an unknown kind, and its name ends in neither \.gguf nor \.safetensors")


def zip_bytes(tmp_path: Path) -> bytes:
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 40)
    return (tmp_path / "zip").read_bytes()


MISNAMED = {
    "a zip archive, as PyTorch pickles are. Loading a pickle": zip_bytes,
    "a Python pickle. Loading a pickle": lambda _: pickle.dumps({"a": [1] * 40}, protocol=4),
    "a GGML file older than GGUF. Convert the original": lambda _: b"tjgg" + b"\0" * 60,
    "an HDF5 file. Convert it": lambda _: b"\x89HDF\r\n\x1a\n" + b"\0" * 60,
    "a Git LFS pointer. Run `git lfs pull`": lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "an HTML page. The download got a web page": lambda _: b"\n<!DOCTYPE html><html></html>",
    "JSON text. Fetch it again": lambda _: b'{"error": "not found"}',
    "empty. Fetch it again": lambda _: b"",
}


@pytest.mark.parametrize("suffix", [".gguf", ".safetensors"])
@pytest.mark.parametrize("message", MISNAMED)
def test_a_misnamed_file_is_told_by_its_bytes(tiny_folder: Path, suffix: str, message: str) -> None:
    path = tiny_folder / f"other{suffix}"
    path.write_bytes(MISNAMED[message](tiny_folder.parent))
    expected = "a GGUF file" if suffix == ".gguf" else "a safetensors file"
    refuse(path, f"should be {expected}, but it is {message}")


def test_gguf_and_safetensors_under_each_other_s_name(tiny_folder: Path, tiny_gguf: Callable[..., Path]) -> None:
    (tiny_folder / "model.safetensors").rename(tiny_folder / "x.gguf")
    refuse(
        tiny_folder / "x.gguf",
        r"should be a GGUF file, but it is a safetensors file\. Rename it to end in \.safetensors",
    )
    tiny_gguf("llama").rename(tiny_folder / "y.safetensors")
    refuse(
        tiny_folder / "y.safetensors",
        r"should be a safetensors file, but it is a GGUF file\. Rename it to end in \.gguf",
    )


def test_a_file_that_may_not_be_read_is_refused(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_folder / "config.json"
    path.unlink()
    path.symlink_to(tiny_folder / "config.json2")
    (tiny_folder / "config.json2").write_text("{}")
    real = Path.read_bytes

    def denied(self: Path) -> bytes:
        if self == path:
            raise PermissionError(13, "Permission denied")
        return real(self)

    monkeypatch.setattr(Path, "read_bytes", denied)
    refuse(tiny_folder, "config.json cannot be read: Permission denied")


@pytest.mark.parametrize("model", ["/no/such/model", "./org/name", "just-a-name", "a/b/c", "x.gguf"])
def test_a_model_that_is_nowhere_is_refused(model: str) -> None:
    refuse(
        model,
        r"there is no such file or folder, and it is no hub id \(owner/name\) and no bundled name \(smollm2-135m\)",
        ModelNotFoundError,
    )


def test_a_revision_of_a_folder_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--revision v2 is for models on the hub, but --model .* is not one\. Drop it"
    ):
        open_model(tiny_folder, revision="v2")
    with pytest.raises(ConfigError, match="--model smollm2-135m is not one"):
        open_model("smollm2-135m", revision="v2")


def test_the_file_is_closed_when_opening_fails(tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf("llama", change={"llama.block_count": None})
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        refuse(path, "lacks the metadata key", ModelError)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_generation_config_is_kept_as_it_is(tiny_folder: Path) -> None:
    content = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": 7}
    (tiny_folder / "generation_config.json").write_text(json.dumps(content))
    assert open_model(tiny_folder).generation_config == content
