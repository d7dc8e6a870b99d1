"""Golden files: any reader of safetensors opens them, and what is not whole, not ours or not known is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cardan.accuracy import container
from cardan.accuracy.container import VERSION, read_container, write_container
from cardan.errors import GoldenFileError

HEADER = {"model": "tiny", "text": "naïve — 你好", "list": [1, 2.5, None]}
ARRAYS = {
    "logprobs": np.linspace(-3, 0, 12, dtype=np.float32).reshape(3, 4),
    "ids": np.arange(7, dtype=np.uint16),
    "none": np.zeros((0, 4), np.int32),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "x.cardan"
    write_container(file, HEADER, ARRAYS)
    return file


def test_what_was_written_is_read(path: Path) -> None:
    found = read_container(path)
    assert found.header == HEADER
    assert found.version == VERSION
    assert {name: (array.dtype, array.shape) for name, array in found.arrays.items()} == {
        name: (array.dtype, array.shape) for name, array in ARRAYS.items()
    }
    assert all((found.arrays[name] == ARRAYS[name]).all() for name in ARRAYS)
    assert not list(path.parent.glob("*.part"))


def test_readers_of_safetensors_open_it(path: Path) -> None:
    found = load_file(path)
    assert (found["logprobs"] == ARRAYS["logprobs"]).all()
    assert found["ids"].dtype == np.uint16


@pytest.mark.parametrize("kept", [0, 5, 20, 200])
def test_a_truncated_file_is_refused(path: Path, kept: int) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[:kept])
    with pytest.raises(GoldenFileError, match=r"truncated|does not begin as safetensors do"):
        read_container(path)


def test_the_last_byte_is_missed(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    with pytest.raises(GoldenFileError, match=r"is truncated: it has 61 bytes of data, expected 62. Copy it again"):
        read_container(path)
    path.write_bytes(raw + b"x")
    with pytest.raises(GoldenFileError, match="followed by what does not belong to it"):
        read_container(path)


def _altered(path: Path, old: bytes, new: bytes) -> None:
    raw = path.read_bytes()
    assert raw.count(old) == 1
    assert len(old) == len(new)
    path.write_bytes(raw.replace(old, new))


def test_one_changed_byte_is_found(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(bytes(raw))
    with pytest.raises(GoldenFileError, match="was changed after it was written"):
        read_container(path)


@pytest.mark.parametrize(
    ("old", "new"), [(b"tiny", b"tidy"), (b'"logprobs"', b'"logprobz"'), (b'"shape": [3, 4]', b'"shape": [4, 3]')]
)
def test_a_changed_header_is_found(path: Path, old: bytes, new: bytes) -> None:
    _altered(path, old, new)
    with pytest.raises(GoldenFileError, match="was changed after it was written"):
        read_container(path)


def test_a_size_that_does_not_fit_is_damage(path: Path) -> None:
    _altered(path, b'"shape": [3, 4]', b'"shape": [3, 5]')
    with pytest.raises(GoldenFileError, match="is damaged: 'logprobs' has not the size of its shape"):
        read_container(path)
    _altered(path, b'"dtype": "F32"', b'"dtype": "X32"')
    with pytest.raises(GoldenFileError, match="its entry of 'logprobs' makes no sense"):
        read_container(path)


def test_a_later_version_says_what_to_do(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "VERSION", VERSION + 1)
    write_container(path, HEADER, ARRAYS)
    monkeypatch.undo()
    with pytest.raises(GoldenFileError, match=rf"has version {VERSION + 1} .* reads up to {VERSION}. Update Cardan"):
        read_container(path)


def test_a_version_that_is_no_number_is_damage(path: Path) -> None:
    _altered(path, b'"version": "1"', b'"version": "x"')
    with pytest.raises(GoldenFileError, match="its version is 'x', expected a number"):
        read_container(path)


def test_other_files_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(GoldenFileError, match=r"There is no file .*cardan accuracy record --out"):
        read_container(tmp_path / "absent")
    with pytest.raises(GoldenFileError, match="cannot be read"):
        read_container(tmp_path)
    other = tmp_path / "weights.safetensors"
    save_file({"x": np.zeros(3, np.float32)}, other)
    with pytest.raises(GoldenFileError, match="is a safetensors file, but no golden file"):
        read_container(other)
    for broken in (b"{not json", json.dumps([1]).encode()):
        other.write_bytes(len(broken).to_bytes(8, "little") + broken)
        with pytest.raises(GoldenFileError, match=r"header is no JSON|does not begin as safetensors"):
            read_container(other)


def test_a_header_that_is_nested_too_deep_is_damage(tmp_path: Path) -> None:
    path, header = tmp_path / "a", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(GoldenFileError, match="its header is no JSON"):
        read_container(path)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(GoldenFileError, match=r"cannot be written: No such file or directory. Choose another place"):
        write_container(tmp_path / "absent" / "x.cardan", HEADER, ARRAYS)
