"""Read the header of a GGUF file: metadata and where each tensor lies. Every count and offset is checked first.

It knows no architecture and reads no tensor.
Source: the GGUF specification, versions 2 and 3, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from cardan.errors import CheckpointError
from cardan.quantization import FORMATS, tensor_bytes
from cardan.weights.mapped_file import MappedFile

TYPE_NAMES: Mapping[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
"""Names of tensor types by their number in the file."""

_SCALARS: Mapping[int, tuple[str, int]] = {
    0: ("<u1", 1),
    1: ("<i1", 1),
    2: ("<u2", 2),
    3: ("<i2", 2),
    4: ("<u4", 4),
    5: ("<i4", 4),
    6: ("<f4", 4),
    7: ("<u1", 1),
    10: ("<u8", 8),
    11: ("<i8", 8),
    12: ("<f8", 8),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LEAST_KEY_BYTES = 8 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_DEEPEST_ARRAY = 4
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies.

    Attributes:
        name: its name in the file.
        fmt: a key of ``FORMATS``.
        shape: outermost dimension first.
        start: first byte in the file.
        num_bytes: how many bytes.
    """

    name: str
    fmt: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything in a GGUF file but the tensors' bytes.

    Attributes:
        path: the file, for messages.
        version: of the format.
        metadata: plain values and lists by key.
        tensors: by their names in the file, in its order.
    """

    path: Path
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_header(file: MappedFile) -> GgufHeader:
    """Read and check the header of a mapped GGUF file.

    Raises:
        CheckpointError: the file is damaged, incomplete, of another version, or holds a type that Cardan does not read.
    """
    return _HeaderReader(file).read()


class _HeaderReader:
    """A position in the header; every read is checked against the end of the file."""

    def __init__(self, file: MappedFile) -> None:
        self._path = file.path
        self._buffer = file.buffer
        self._size = file.size
        self._at = 0

    def read(self) -> GgufHeader:
        if self._take(4, "the magic") != b"GGUF":
            raise CheckpointError(f"{self._path} is no GGUF file: it does not begin with 'GGUF'. Fetch it again.")
        version = self._version()
        num_tensors = self._u64("the number of tensors")
        num_keys = self._u64("the number of metadata keys")
        self._check_count(num_keys, _LEAST_KEY_BYTES, "metadata keys")
        metadata = self._metadata(num_keys)
        self._check_count(num_tensors, _LEAST_TENSOR_BYTES, "tensors")
        tensors = self._tensors(num_tensors, metadata)
        return GgufHeader(self._path, version, metadata, tensors)

    def _version(self) -> int:
        version = self._u32("the version")
        if version in (2, 3):
            return version
        if version in (2 << 24, 3 << 24):
            raise CheckpointError(
                f"{self._path} is a big-endian GGUF file; Cardan reads little-endian ones. Convert it on the machine "
                "that made it, or fetch the little-endian file."
            )
        raise CheckpointError(
            f"{self._path} is GGUF version {version}; Cardan reads versions 2 and 3. Convert the model again."
        )

    # --- metadata ---

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(count):
            key = self._string(f"metadata key {index}")
            if key in metadata:
                self._fail(f"the metadata key {key!r} occurs twice")
            metadata[key] = self._value(self._u32(f"the type of {key!r}"), f"the value of {key!r}", 0)
        return metadata

    def _value(self, kind: int, what: str, depth: int) -> Any:
        if kind == _STRING:
            return self._string(what)
        if kind == _ARRAY:
            return self._array(what, depth)
        if kind not in _SCALARS:
            self._fail(f"{what} has the unknown type {kind}")
        return self._numbers(kind, 1, what)[0]

    def _array(self, what: str, depth: int) -> list[Any]:
        if depth == _DEEPEST_ARRAY:
            self._fail(f"{what} nests arrays deeper than {_DEEPEST_ARRAY}")
        kind, count = self._u32(f"the type of {what}"), self._u64(f"the length of {what}")
        if kind == _STRING:
            return self._strings(count, what)
        if kind == _ARRAY:
            self._check_count(count, 12, f"arrays in {what}")
            return [self._array(what, depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            self._fail(f"{what} has elements of the unknown type {kind}")
        return self._numbers(kind, count, what)

    def _numbers(self, kind: int, count: int, what: str) -> list[Any]:
        dtype, size = _SCALARS[kind]
        self._check_count(count, size, f"elements in {what}")
        raw = self._take(count * size, what)
        values: list[Any] = np.frombuffer(raw, dtype=dtype).tolist()
        return [value != 0 for value in values] if kind == _BOOL else values

    def _string(self, what: str) -> str:
        raw = self._take(self._u64(f"the length of {what}"), what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self._fail(f"{what} is not UTF-8")

    def _strings(self, count: int, what: str) -> list[str]:
        """Many strings at once: vocabularies have hundreds of thousands, so the loop is kept bare."""
        self._check_count(count, 8, f"strings in {what}")
        buffer, at, unpack = self._buffer, self._at, _U64.unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(buffer, at)[0]
                strings.append(buffer[start:at].decode())
        except (struct.error, OverflowError):
            self._fail(f"{what} ends beyond the file after {len(strings)} of {count} strings")
        except UnicodeDecodeError:
            self._fail(f"{what} holds a string that is not UTF-8 after {len(strings)} of {count}")
        if at > self._size:
            self._fail(f"{what} ends beyond the file")
        self._at = at
        return strings

    # --- tensors ---

    def _tensors(self, count: int, metadata: Mapping[str, Any]) -> dict[str, GgufTensor]:
        entries = [self._tensor_entry(index) for index in range(count)]
        alignment = self._alignment(metadata)
        data_start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                self._fail(f"the tensor {name!r} occurs twice")
            if offset % alignment:
                self._fail(f"tensor {name!r} begins at offset {offset}, which is not a multiple of {alignment}")
            fmt = self._format(name, kind)
            tensors[name] = GgufTensor(name, fmt, shape, data_start + offset, self._num_bytes(name, fmt, shape))
        self._check_places(tensors)
        return tensors

    def _tensor_entry(self, index: int) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string(f"the name of tensor {index}")
        dims = self._u32(f"the number of dimensions of tensor {name!r}")
        if not 1 <= dims <= 4:
            self._fail(f"tensor {name!r} has {dims} dimensions, 1 to 4 are possible")
        shape = tuple(self._u64(f"the shape of tensor {name!r}") for _ in range(dims))[::-1]
        if 0 in shape:
            self._fail(f"tensor {name!r} has the shape {shape}, which holds nothing")
        kind = self._u32(f"the type of tensor {name!r}")
        return name, shape, kind, self._u64(f"the offset of tensor {name!r}")

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8 or alignment > 1 << 20:
            self._fail(f"general.alignment must be a multiple of 8, got {alignment!r}")
        return alignment

    def _format(self, name: str, kind: int) -> str:
        fmt = TYPE_NAMES.get(kind)
        if fmt is None:
            self._fail(f"tensor {name!r} has the unknown type {kind}")
        if fmt not in FORMATS:
            raise CheckpointError(
                f"{self._path}: tensor {name!r} is of type {fmt}, which Cardan does not read. It reads "
                f"{', '.join(known for known in TYPE_NAMES.values() if known in FORMATS)}. "
                "Fetch or convert the model with one of these."
            )
        return fmt

    def _num_bytes(self, name: str, fmt: str, shape: tuple[int, ...]) -> int:
        try:
            return tensor_bytes(fmt, shape)
        except CheckpointError as error:
            raise CheckpointError(f"{self._path}: tensor {name!r}: {error}") from None

    def _check_places(self, tensors: Mapping[str, GgufTensor]) -> None:
        end, before = 0, ""
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
            if tensor.start < end:
                self._fail(f"tensors {before!r} and {tensor.name!r} overlap at byte {tensor.start}")
            end, before = tensor.start + tensor.num_bytes, tensor.name
            if end > self._size:
                self._fail(f"tensor {tensor.name!r} ends at byte {end}, but the file has {self._size} bytes")

    # --- reading ---

    def _check_count(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > self._size - self._at:
            self._fail(f"{count} {what} are announced, more than the rest of the file can hold")

    def _take(self, count: int, what: str) -> bytes:
        start = self._at
        if count > self._size - start:
            self._fail(f"{what} takes {count} bytes, but only {self._size - start} are left")
        self._at = start + count
        return self._buffer[start : self._at]

    def _u32(self, what: str) -> int:
        return int(_U32.unpack(self._take(4, what))[0])

    def _u64(self, what: str) -> int:
        return int(_U64.unpack(self._take(8, what))[0])

    def _fail(self, problem: str) -> NoReturn:
        raise CheckpointError(
            f"{self._path}: {problem} (header read up to byte {self._at}). "
            "The file is damaged or incomplete; fetch it again."
        )
