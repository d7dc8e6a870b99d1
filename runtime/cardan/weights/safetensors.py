"""Read safetensors files, one or several with an index, without copying a tensor.

It knows no model; names and shapes are taken as they are.
Source: the safetensors format, https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from cardan.errors import CheckpointError
from cardan.quantization import tensor_bytes
from cardan.types import TensorView
from cardan.weights.json_file import parse_json_object, read_json_object
from cardan.weights.kinds import FileKind, check_kind
from cardan.weights.mapped_file import MappedFile

INDEX_NAME = "model.safetensors.index.json"

LARGEST_HEADER_BYTES = 100_000_000
"""Longer headers are refused, as the format's own library does."""

_MOST_DIMENSIONS = 32

_DTYPES = frozenset(
    {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"}
)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one tensor lies.

    Attributes:
        file: which of the mapped files.
        dtype: its format.
        shape: outermost dimension first.
        start: first byte in the file.
        end: byte after the last.
    """

    file: MappedFile
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsStore:
    """Tensors of one or more mapped safetensors files."""

    def __init__(self, paths: Sequence[Path], weight_map: Mapping[str, Path] | None = None) -> None:
        self._files: list[MappedFile] = []
        self._places: dict[str, _Place] = {}
        try:
            for path in paths:
                self._open(path, weight_map)
            for name, path in (weight_map or {}).items():
                if name not in self._places:
                    raise CheckpointError(
                        f"{path} has no tensor {name!r}, which {INDEX_NAME} says is in it. "
                        "The files belong to different versions of the model; fetch them again."
                    )
        except CheckpointError:
            self.close()
            raise

    def _open(self, path: Path, weight_map: Mapping[str, Path] | None) -> None:
        check_kind(path, FileKind.SAFETENSORS)
        file = MappedFile(path)
        self._files.append(file)
        for name, place in _read_places(file).items():
            if weight_map is not None and weight_map.get(name) != path:
                continue
            if name in self._places:
                raise CheckpointError(
                    f"The tensor {name!r} is in both {self._places[name].file.path} and {path}. Keep one of the files."
                )
            self._places[name] = place

    def info(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Format and shape of every tensor by name."""
        return {name: (place.dtype, place.shape) for name, place in self._places.items()}

    def tensor(self, name: str) -> TensorView:
        """A tensor, mapped."""
        place = self._places[name]
        return TensorView(name, place.dtype, place.shape, place.file.view[place.start : place.end])

    def close(self) -> None:
        """Unmap the files."""
        for file in self._files:
            file.close()
        self._files.clear()


def read_index(path: Path) -> dict[str, Path]:
    """The file of each tensor, from an index; every file is there.

    Raises:
        CheckpointError: the index is damaged, or files are missing.
    """
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map. Fetch it again.")
    files: dict[str, Path] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name or not file_name:
            raise CheckpointError(
                f"{path}: {file_name!r} is no plain file name, for the tensor {name!r}. Fetch it again."
            )
        files[name] = path.parent / file_name
    missing = sorted({file.name for file in files.values() if not file.is_file()})
    if missing:
        raise CheckpointError(
            f"{path.parent} lacks {len(missing)} of the {len(set(files.values()))} files of its index: "
            f"{', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}. Fetch them."
        )
    return files


def _read_places(file: MappedFile) -> dict[str, _Place]:
    if file.size < 8:
        _fail(file, f"it has {file.size} bytes, less than a header")
    header_bytes = int.from_bytes(file.view[:8], "little")
    data_start = 8 + header_bytes
    if data_start > file.size:
        _fail(file, f"its header of {header_bytes} bytes does not fit in {file.size}")
    if header_bytes > LARGEST_HEADER_BYTES:
        _fail(file, f"its header of {header_bytes} bytes is larger than {LARGEST_HEADER_BYTES}")
    header = parse_json_object(bytes(file.view[8:data_start]), f"{file.path}: its header")
    header.pop("__metadata__", None)
    places = {name: _place(file, name, entry, data_start) for name, entry in header.items()}
    _check_coverage(file, places, data_start)
    return places


def _place(file: MappedFile, name: str, entry: Any, data_start: int) -> _Place:
    if not isinstance(entry, dict):
        _fail(file, f"the entry of tensor {name!r} is no object")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise CheckpointError(
            f"{file.path}: tensor {name!r} has the type {dtype!r}; Cardan reads {', '.join(sorted(_DTYPES))}."
        )
    shape = _whole_numbers(entry.get("shape"), _MOST_DIMENSIONS)
    offsets = _whole_numbers(entry.get("data_offsets"), 2)
    if shape is None or offsets is None or len(offsets) != 2:
        _fail(
            file,
            f"tensor {name!r} has the shape {_short(entry.get('shape'))} "
            f"and the offsets {_short(entry.get('data_offsets'))}",
        )
    start, end = data_start + offsets[0], data_start + offsets[1]
    if not start <= end <= file.size:
        _fail(file, f"tensor {name!r} should be at bytes {start} to {end}, but the file has {file.size}")
    expected = tensor_bytes(dtype, shape)
    if end - start != expected:
        _fail(file, f"tensor {name!r} has {end - start} bytes, but {dtype} of shape {shape} takes {expected}")
    return _Place(file, dtype, shape, start, end)


def _check_coverage(file: MappedFile, places: Mapping[str, _Place], data_start: int) -> None:
    """Tensors must fill the file from the header to its end, without overlap or hole."""
    end, before = data_start, "the header"
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].end)):
        if place.start != end:
            problem = "overlaps" if place.start < end else "leaves a hole after"
            _fail(file, f"tensor {name!r} at byte {place.start} {problem} {before}, which ends at byte {end}")
        end, before = place.end, f"tensor {name!r}"
    if end != file.size:
        _fail(file, f"its tensors end at byte {end}, but the file has {file.size}")


def _whole_numbers(value: Any, most: int) -> tuple[int, ...] | None:
    if not isinstance(value, list) or len(value) > most:
        return None
    if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in value):
        return None
    return tuple(value)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _fail(file: MappedFile, problem: str) -> NoReturn:
    raise CheckpointError(f"{file.path}: {problem}. The file is damaged or incomplete; fetch it again.")
