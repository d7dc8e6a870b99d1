"""The file that arrays and a JSON header are kept in: safetensors, with a version and a checksum over all of it.

It does not know what the arrays mean. Any reader of safetensors opens such a file; the header stands in its metadata.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cardan.errors import GoldenFileError

Arrays = Mapping[str, npt.NDArray[Any]]

FORMAT = "cardan-golden"
VERSION = 1
"""Of the layout; a reader takes its own version and those before."""
_DTYPES = {
    "F32": np.float32,
    "F64": np.float64,
    "F16": np.float16,
    "I32": np.int32,
    "U16": np.uint16,
    "U8": np.uint8,
    "I64": np.int64,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_LONGEST_TABLE = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Container:
    """What such a file holds.

    Attributes:
        header: plain JSON values.
        arrays: by name.
        version: of the layout it was written in.
    """

    header: Mapping[str, Any]
    arrays: Arrays
    version: int = VERSION


def write_container(path: Path, header: Mapping[str, Any], arrays: Arrays) -> None:
    """Write a file; one that is there is replaced once the new one is whole.

    Raises:
        GoldenFileError: the folder cannot be written.
    """
    table, blobs, offset = {}, [], 0
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        blob = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        span = [offset, offset + len(blob)]
        table[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": span}
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":"))
    data = b"".join(blobs)
    metadata = {"format": FORMAT, "version": str(VERSION), "header": text}
    metadata["sha256"] = _digest(metadata, table, data)
    encoded = json.dumps({"__metadata__": metadata, **table}, ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise GoldenFileError(f"{path} cannot be written: {error.strerror}. Choose another place.") from error


def read_container(path: Path) -> Container:
    """Read a file and check that it is whole and as it was written.

    Raises:
        GoldenFileError: it is missing, no such file, truncated, changed, or of a version that is not known here.
    """
    raw = _read(path)
    table, start = _table(path, raw)
    metadata = table.pop("__metadata__", None)
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise GoldenFileError(
            f"{path} is a safetensors file, but no golden file: its metadata does not say {FORMAT}. "
            "Make one with `cardan accuracy record`."
        )
    version = _version(path, metadata)
    data = raw[start:]
    size = _size_of_data(path, table)
    if len(data) != size:
        what = "truncated" if len(data) < size else "followed by what does not belong to it"
        raise GoldenFileError(f"{path} is {what}: it has {len(data)} bytes of data, expected {size}. Copy it again.")
    if metadata.get("sha256") != _digest(metadata, table, data):
        raise GoldenFileError(
            f"{path} was changed after it was written: its contents do not match its checksum. "
            "Copy it again from where it was made, or record it anew."
        )
    arrays = {name: _array(data, entry) for name, entry in table.items()}
    try:
        header = json.loads(metadata["header"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise GoldenFileError(f"{path} is damaged: its metadata has no header. Record it anew.") from error
    return Container(header=header, arrays=arrays, version=version)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise GoldenFileError(
            f"There is no file {path}. Make one with `cardan accuracy record --out {path}`."
        ) from None
    except OSError as error:
        raise GoldenFileError(f"{path} cannot be read: {error.strerror}.") from error


def _table(path: Path, raw: bytes) -> tuple[dict[str, Any], int]:
    """The safetensors header, and where data begin."""
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or length > _LONGEST_TABLE or raw[8:9] != b"{":
        raise GoldenFileError(
            f"{path} is no golden file: it does not begin as safetensors do. Make one with `cardan accuracy record`."
        )
    if len(raw) < 8 + length:
        raise GoldenFileError(f"{path} is truncated within its header ({len(raw)} bytes). Copy it again.")
    try:
        table = json.loads(raw[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise GoldenFileError(f"{path} is damaged: its header is no JSON ({error}). Copy it again.") from error
    if not isinstance(table, dict):
        raise GoldenFileError(f"{path} is damaged: its header is no JSON object. Copy it again.")
    return table, 8 + length


def _version(path: Path, metadata: Mapping[str, Any]) -> int:
    said = str(metadata.get("version"))
    version = int(said) if said.isascii() and said.isdecimal() and len(said) < 9 else 0
    if version < 1:
        raise GoldenFileError(f"{path} is damaged: its version is {said[:40]!r}, expected a number. Copy it again.")
    if version > VERSION:
        raise GoldenFileError(
            f"{path} has version {version} of the golden format, but this Cardan reads up to {VERSION}. "
            "Update Cardan, or record it with this one."
        )
    return version


def _size_of_data(path: Path, table: Mapping[str, Any]) -> int:
    """Bytes that the table of arrays speaks of, each entry of which must make sense."""
    end = 0
    for name, entry in table.items():
        try:
            dtype, shape, (start, stop) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
            fits = stop - start == int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        except (KeyError, TypeError, ValueError) as error:
            raise GoldenFileError(f"{path} is damaged: its entry of {name!r} makes no sense. Copy it again.") from error
        if not fits or start < 0:
            raise GoldenFileError(f"{path} is damaged: {name!r} has not the size of its shape. Copy it again.")
        end = max(end, stop)
    return end


def _array(data: bytes, entry: Mapping[str, Any]) -> npt.NDArray[Any]:
    start, stop = entry["data_offsets"]
    dtype = np.dtype(_DTYPES[entry["dtype"]])
    values = np.frombuffer(data[start:stop], dtype=dtype.newbyteorder("<")).astype(dtype)
    return values.reshape(entry["shape"])


def _digest(metadata: Mapping[str, Any], table: Mapping[str, Any], data: bytes) -> str:
    digest = hashlib.sha256()
    signed = [str(metadata.get(key)) for key in ("format", "version", "header")]
    entries = [
        [name, table[name]["dtype"], table[name]["shape"], table[name]["data_offsets"]] for name in sorted(table)
    ]
    digest.update(json.dumps([signed, entries], ensure_ascii=True, separators=(",", ":")).encode())
    digest.update(data)
    return digest.hexdigest()
