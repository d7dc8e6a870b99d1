"""The header reader against the gguf package, and against files that are damaged on purpose."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from cardan.errors import CheckpointError
from cardan.weights.gguf import GgufHeader, read_header
from cardan.weights.mapped_file import MappedFile


def header_of(path: Path) -> GgufHeader:
    file = MappedFile(path)
    try:
        return read_header(file)
    finally:
        file.close()


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, kind: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + payload


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def pack(
    tmp_path: Path,
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    *,
    data: bytes = b"",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> Path:
    num_tensors, num_keys = counts or (len(tensors), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join(keys) + b"".join(tensors)
    path = tmp_path / "packed.gguf"
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def check_against_gguf_package(path: Path, reader: gguf.GGUFReader) -> None:
    header = header_of(path)
    assert list(header.tensors) == [item.name for item in reader.tensors]
    raw = path.read_bytes()
    for item in reader.tensors:
        mine = header.tensors[item.name]
        assert (mine.fmt, mine.shape[::-1]) == (item.tensor_type.name, tuple(item.shape))
        assert (mine.start, mine.num_bytes) == (item.data_offset, item.n_bytes)
        assert raw[mine.start : mine.start + 8] == item.data.tobytes()[:8]
    own = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata == own


@pytest.mark.slow
@pytest.mark.model
def test_the_header_of_a_real_model_is_what_the_gguf_package_reads(
    smollm2_path: Path, smollm2_reader: gguf.GGUFReader
) -> None:
    check_against_gguf_package(smollm2_path, smollm2_reader)


@pytest.mark.parametrize("fmt", ["Q4_0", "Q8_0", "BF16", "F16"])
def test_the_header_of_a_tiny_model_is_what_the_gguf_package_reads(tiny_gguf: Callable[..., Path], fmt: str) -> None:
    path = tiny_gguf("llama", fmt=fmt)
    check_against_gguf_package(path, gguf.GGUFReader(path))


def test_every_metadata_type_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "types.gguf", "llama")
    values: dict[str, tuple[str, Any]] = {
        "u8": ("uint8", 200),
        "i8": ("int8", -7),
        "u16": ("uint16", 60000),
        "i16": ("int16", -30000),
        "u32": ("uint32", 4_000_000_000),
        "i32": ("int32", -2_000_000_000),
        "f32": ("float32", 0.5),
        "u64": ("uint64", 2**63),
        "i64": ("int64", -(2**62)),
        "f64": ("float64", 0.1),
        "yes": ("bool", True),
        "word": ("string", "grüß dich"),
        "names": ("array", ["a", "", "ß"]),
        "numbers": ("array", [1, -2, 3]),
        "reals": ("array", [0.5, 0.25]),
        "flags": ("array", [True, False]),
    }
    for name, (kind, value) in values.items():
        getattr(writer, f"add_{kind}")(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = header_of(tmp_path / "types.gguf").metadata
    for name, (_, value) in values.items():
        assert metadata[name] == value
        assert type(metadata[name]) is type(value)


def test_nested_arrays_are_read(tmp_path: Path) -> None:
    inner = struct.pack("<IQ2H", 2, 2, 7, 8)
    path = pack(tmp_path, (key("nested", 9, struct.pack("<IQ", 9, 2) + inner + inner),))
    assert header_of(path).metadata == {"nested": [[7, 8], [7, 8]]}


def test_version_2_is_read(tmp_path: Path) -> None:
    path = pack(tmp_path, (key("a", 4, struct.pack("<I", 5)),), version=2)
    header = header_of(path)
    assert (header.version, header.metadata) == (2, {"a": 5})


def test_the_alignment_of_the_file_is_used(tmp_path: Path) -> None:
    keys = (key("general.alignment", 4, struct.pack("<I", 64)),)
    path = pack(tmp_path, keys, (tensor("t", (4,), 0, 64),), data=b"\0" * 200)
    start = header_of(path).tensors["t"].start
    assert start % 64 == 0
    assert start >= 128


def numbered(kind: int, payload: bytes) -> tuple[bytes, ...]:
    return (key("k", kind, payload),)


F32_1 = tensor("t", (4,), 0, 0)

DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "another version": ({"version": 1}, "GGUF version 1; Cardan reads versions 2 and 3. Convert the model again"),
    "big-endian": ({"version": 3 << 24}, "is a big-endian GGUF file; Cardan reads little-endian ones"),
    "absurd number of keys": (
        {"counts": (0, 2**60)},
        "1152921504606846976 metadata keys are announced, more than the rest of the file can hold",
    ),
    "absurd number of tensors": ({"counts": (2**40, 0)}, "1099511627776 tensors are announced"),
    "absurd string": (
        {"keys": (struct.pack("<Q", 2**63) + b"x" * 40,)},
        "metadata key 0 takes 9223372036854775808 bytes",
    ),
    "absurd array": (
        {"keys": numbered(9, struct.pack("<IQ", 10, 2**61))},
        "2305843009213693952 elements in the value of",
    ),
    "absurd string array": ({"keys": numbered(9, struct.pack("<IQ", 8, 2**61))}, "strings in the value of 'k' are"),
    "absurd nested array": ({"keys": numbered(9, struct.pack("<IQ", 9, 2**60))}, "arrays in the value of 'k' are"),
    "deep array": (
        {"keys": numbered(9, struct.pack("<IQ", 9, 1) * 6), "data": b"\0" * 64},
        "nests arrays deeper than 4",
    ),
    "unknown metadata type": ({"keys": numbered(77, b"\0" * 8)}, "the value of 'k' has the unknown type 77"),
    "unknown element type": ({"keys": numbered(9, struct.pack("<IQ", 99, 1))}, "has elements of the unknown type 99"),
    "a key twice": ({"keys": numbered(0, b"1") * 2}, "the metadata key 'k' occurs twice"),
    "key not UTF-8": ({"keys": (struct.pack("<Q", 2) + b"\xff\xfe" + b"\0" * 12,)}, "metadata key 0 is not UTF-8"),
    "value not UTF-8": ({"keys": numbered(8, struct.pack("<Q", 1) + b"\xff")}, "the value of 'k' is not UTF-8"),
    "element not UTF-8": (
        {"keys": numbered(9, struct.pack("<IQ", 8, 2) + text("a") + struct.pack("<Q", 1) + b"\xff")},
        "the value of 'k' holds a string that is not UTF-8 after 1 of 2",
    ),
    "strings beyond the file": (
        {"keys": numbered(9, struct.pack("<IQ", 8, 2) + text("a") + struct.pack("<Q", 2**40))},
        "the value of 'k' ends beyond the file",
    ),
    "strings far beyond the file": (
        {"keys": numbered(9, struct.pack("<IQQQ", 8, 3, 2**63, 5)), "data": b"\0" * 32},
        "the value of 'k' ends beyond the file after 1 of 3 strings",
    ),
    "no dimension": ({"tensors": (tensor("t", (), 0, 0) + b"\0" * 8,)}, "tensor 't' has 0 dimensions, 1 to 4"),
    "many dimensions": ({"tensors": (tensor("t", (1,) * 5, 0, 0),)}, "tensor 't' has 5 dimensions"),
    "empty shape": (
        {"tensors": (tensor("t", (4, 0), 0, 0),)},
        r"tensor 't' has the shape \(0, 4\), which holds nothing",
    ),
    "unknown tensor type": ({"tensors": (tensor("t", (4,), 250, 0),)}, "tensor 't' has the unknown type 250"),
    "type that is not read": (
        {"tensors": (tensor("t", (256,), 19, 0),)},
        "tensor 't' is of type IQ1_S, which Cardan does not read. It reads F32, F16, Q4_0, .* Fetch or convert",
    ),
    "broken blocks": ({"tensors": (tensor("t", (33,), 8, 0),)}, "tensor 't': Q8_0 stores rows in blocks of 32"),
    "beyond the file": ({"tensors": (F32_1,), "data": b"\0" * 15}, "tensor 't' ends at byte .*, but the file has"),
    "absurd shape": ({"tensors": (tensor("t", (2**62, 2**62), 0, 0),)}, "tensor 't' ends at byte"),
    "absurd offset": ({"tensors": (tensor("t", (4,), 0, 2**63),), "data": b"\0" * 64}, "tensor 't' ends at byte"),
    "crooked offset": (
        {"tensors": (tensor("t", (4,), 0, 7),), "data": b"\0" * 64},
        "offset 7, which is not a multiple of 32",
    ),
    "overlap": (
        {"tensors": (tensor("a", (16,), 0, 0), tensor("b", (4,), 0, 32)), "data": b"\0" * 96},
        "tensors 'a' and 'b' overlap at byte",
    ),
    "a tensor twice": (
        {"tensors": (F32_1, tensor("t", (4,), 0, 32)), "data": b"\0" * 96},
        "the tensor 't' occurs twice",
    ),
    "crooked alignment": (
        {"keys": (key("general.alignment", 4, struct.pack("<I", 33)),)},
        "general.alignment must be a multiple of 8, got 33",
    ),
    "alignment of another type": (
        {"keys": (key("general.alignment", 8, text("x")),)},
        "must be a multiple of 8, got 'x'",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_header_is_refused_with_the_place(tmp_path: Path, case: str) -> None:
    arguments, message = DAMAGED[case]
    path = pack(tmp_path, **arguments)
    with pytest.raises(CheckpointError, match=message) as caught:
        header_of(path)
    assert str(path) in str(caught.value)


def test_another_magic_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"WHAT" + b"\0" * 40)
    with pytest.raises(CheckpointError, match="is no GGUF file: it does not begin with 'GGUF'"):
        header_of(path)


def test_a_file_that_ends_anywhere_in_the_header_is_refused(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    whole = tiny_gguf("llama").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(1, 3000, 23), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"fetch it again|Fetch it again"):
            header_of(cut)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.touch()
    with pytest.raises(CheckpointError, match=r"is empty\. Fetch it again"):
        MappedFile(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        MappedFile(tmp_path)


def test_views_outlive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abcdef")
    file = MappedFile(path)
    part = file.view[2:4]
    file.close()
    assert bytes(part) == b"cd"
    assert np.frombuffer(part, dtype=np.uint8).tolist() == [99, 100]
