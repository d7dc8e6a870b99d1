"""Hub ids: the cache on this machine first, then a downloader that stands in for the hub."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from cardan.config import ModelConfig
from cardan.errors import CheckpointError, ModelNotFoundError
from cardan.weights import OpenedCheckpoint, open_checkpoint, open_description

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def open_model(model: str, **options: Any) -> OpenedCheckpoint:
    return open_checkpoint(ModelConfig(model=model, **options))


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return cache


@pytest.fixture
def cached(hub_cache: Path, tiny_folder: Path) -> Path:
    """The tiny folder as the hub's cache keeps it: a commit, a ref, and links to blobs."""
    repo = hub_cache / "models--org--tiny.model"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "blobs").mkdir()
    for file in tiny_folder.iterdir():
        blob = repo / "blobs" / file.name
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(blob)
    return snapshot


class Hub:
    """Stands in for ``huggingface_hub``: has some files, and notes what is asked of it."""

    def __init__(self, files: dict[str, Path | None], folder: Path) -> None:
        self.files = files
        self.folder = folder
        self.asked: list[dict[str, Any]] = []

    def list_repo_files(self, repo: str, *, revision: str | None) -> list[str]:
        return list(self.files)

    def snapshot_download(self, repo: str, *, revision: str | None, cache_dir: Path, allow_patterns: list[str]) -> str:
        self.asked.append({"repo": repo, "revision": revision, "patterns": allow_patterns, "cache_dir": cache_dir})
        self.folder.mkdir(exist_ok=True)
        for name, source in self.files.items():
            if source is not None and any(Path(name).match(pattern) for pattern in allow_patterns):
                (self.folder / name).write_bytes(source.read_bytes())
        return str(self.folder)


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[dict[str, Path | None]], Hub]:
    def start(files: dict[str, Path | None]) -> Hub:
        hub = Hub(files, tmp_path / "downloaded")
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setattr(huggingface_hub, "list_repo_files", hub.list_repo_files)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
        return hub

    return start


def files_of(folder: Path) -> dict[str, Path | None]:
    return {file.name: file for file in folder.iterdir()}


# --- the cache ----------------------------------------------------------------------------------


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_cached_model_is_opened_offline(cached: Path, revision: str | None) -> None:
    checkpoint = open_model("org/tiny.model", revision=revision)
    assert (checkpoint.path, checkpoint.name) == (cached, "tiny.model")
    assert checkpoint.config["hidden_size"] == 4


def test_a_cached_model_is_not_asked_for_online(cached: Path, online: Callable[..., Hub]) -> None:
    hub = online({})
    assert open_model("org/tiny.model").path == cached
    assert hub.asked == []


def test_another_revision_is_not_taken_from_the_cache(cached: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"org/tiny.model@v9 was not found: .*not in the hub's cache"):
        open_model("org/tiny.model", revision="v9")


def test_a_gguf_file_is_taken_from_the_cache(cached: Path, tiny_gguf: Callable[..., Path]) -> None:
    tiny_gguf("llama").rename(cached / "x-Q8_0.gguf")
    checkpoint = open_model("org/tiny.model/x-Q8_0.gguf")
    assert (checkpoint.path, checkpoint.name) == (cached / "x-Q8_0.gguf", "x-Q8_0")
    with pytest.raises(
        ModelNotFoundError, match=r"org/tiny.model/y.gguf was not found: .*cache is incomplete \(.*y.gguf is"
    ):
        open_model("org/tiny.model/y.gguf")


def test_a_cached_tokenizer_is_found(cached: Path, tiny_gguf: Callable[..., Path]) -> None:
    for name in ("model.safetensors", "config.json"):
        (cached / name).unlink()
    assert open_model(str(tiny_gguf("llama")), tokenizer="org/tiny.model").tokenizer.folder == cached


def test_an_incomplete_cache_says_what_is_missing(cached: Path) -> None:
    (cached / "model.safetensors").unlink()
    with pytest.raises(
        ModelNotFoundError,
        match=r"no such folder .*org/tiny.model; the hub's cache is incomplete \(.*no weights.*HF_HUB_OFFLINE is set",
    ):
        open_model("org/tiny.model")


def test_what_was_tried_is_named_offline(hub_cache: Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        open_model("org/name")
    message = str(caught.value)
    for part in (
        "--model org/name",
        "no such folder",
        str(hub_cache),
        "HF_HUB_OFFLINE is set",
        "Pass a folder or a .gguf",
    ):
        assert part in message


# --- the hub ------------------------------------------------------------------------------------


def test_a_model_is_downloaded(tiny_folder: Path, online: Callable[..., Hub], hub_cache: Path) -> None:
    (tiny_folder / "pytorch_model.bin").write_bytes(b"x")
    hub = online(files_of(tiny_folder))
    checkpoint = open_model("org/name", revision="v1")
    assert checkpoint.name == "name"
    assert checkpoint.config["hidden_size"] == 4
    assert not (hub.folder / "pytorch_model.bin").exists()
    (asked,) = hub.asked
    assert (asked["repo"], asked["revision"], asked["cache_dir"]) == ("org/name", "v1", hub_cache)


def test_an_incomplete_cache_is_completed(cached: Path, tiny_folder: Path, online: Callable[..., Hub]) -> None:
    (cached / "model.safetensors").unlink()
    hub = online(files_of(tiny_folder))
    assert open_model("org/tiny.model").path == hub.folder


def test_the_only_gguf_file_is_downloaded(tiny_gguf: Callable[..., Path], online: Callable[..., Hub]) -> None:
    hub = online({"x.gguf": tiny_gguf("llama"), "README.md": None})
    assert open_model("org/name-GGUF").path == hub.folder / "x.gguf"


def test_one_of_several_gguf_files_is_downloaded(tiny_gguf: Callable[..., Path], online: Callable[..., Hub]) -> None:
    path = tiny_gguf("llama")
    hub = online({"a.gguf": path, "b.gguf": path})
    with pytest.raises(
        CheckpointError, match=r"on the hub has 2 GGUF files: a.gguf, b.gguf\. Choose one: --model org/name/a.gguf"
    ):
        open_model("org/name")
    assert hub.asked == []
    assert open_model("org/name/b.gguf").path == hub.folder / "b.gguf"
    assert hub.asked[0]["patterns"] == ["b.gguf"]
    with pytest.raises(CheckpointError, match=r"org/name on the hub has no file c.gguf; it has a.gguf, b.gguf"):
        open_model("org/name/c.gguf")


def test_shards_are_downloaded_without_other_weights(online: Callable[..., Hub]) -> None:
    names = [
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "consolidated.safetensors",
    ]
    hub = online(dict.fromkeys(names))
    with pytest.raises(CheckpointError):
        open_model("org/name")
    assert hub.asked[0]["patterns"][-1] == "model-*.safetensors"


def test_a_tokenizer_is_downloaded_without_weights(tiny_folder: Path, online: Callable[..., Hub]) -> None:
    hub = online(files_of(tiny_folder))
    (tiny_folder / "elsewhere").mkdir()
    checkpoint = open_model(str(tiny_folder), tokenizer="org/name")
    assert checkpoint.tokenizer.folder == hub.folder
    assert not (hub.folder / "model.safetensors").exists()


def test_random_weights_download_no_weights(tiny_folder: Path, online: Callable[..., Hub]) -> None:
    hub = online(files_of(tiny_folder))
    assert open_description(ModelConfig(model="org/name", random_weights=0)).config["hidden_size"] == 4
    assert not (hub.folder / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["config.json", "pytorch_model.bin"], r"has its weights in pickles only\. Loading a pickle can run any code"),
        (["README.md"], r"org/name on the hub has no weights: no \*\.safetensors and no \*\.gguf"),
    ],
)
def test_what_is_not_read_is_not_downloaded(online: Callable[..., Hub], names: list[str], message: str) -> None:
    hub = online(dict.fromkeys(names))
    with pytest.raises(CheckpointError, match=message):
        open_model("org/name")
    assert hub.asked == []


@pytest.mark.parametrize(
    "error",
    [
        HfHubHTTPError.__bases__[0]("no route\nto host"),  # of the HTTP library that this version stands on
        ConnectionError("no route to host"),
        LocalEntryNotFoundError("no route to host"),
    ],
)
def test_a_hub_that_cannot_be_reached_is_named(
    error: Exception, online: Callable[..., Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    online({})

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "list_repo_files", fail)
    expected = f"the hub said {type(error).__name__}: no route to host.*Pass a folder or a .gguf file"
    with pytest.raises(ModelNotFoundError, match=expected):
        open_model("org/name")


def test_a_download_that_breaks_off_is_named(
    tiny_folder: Path, online: Callable[..., Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    online(files_of(tiny_folder))

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelNotFoundError, match="the hub said OSError: disk full"):
        open_model("org/name")


def test_a_hub_without_a_network_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real library, whose HTTP library's own errors come out of it."""
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def refuse(*_: Any, **__: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(time, "sleep", lambda _s: None)
    with pytest.raises(ModelNotFoundError, match=r"the hub said ConnectError: .*Name or service not known"):
        open_model("org/name")


def test_a_hub_library_that_is_not_installed_is_named(
    online: Callable[..., Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    online({})
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        ModelNotFoundError, match=r"huggingface_hub is not installed, .* \(pip install 'cardan\[hub\]'\)"
    ):
        open_model("org/name")
