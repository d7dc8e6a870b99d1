"""Which files of a folder are the model: safetensors with or without an index, or one GGUF file.

It reads no tensor. Pickles are refused and never opened.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cardan.errors import CheckpointError
from cardan.weights.json_file import read_json_object
from cardan.weights.kinds import CONVERT_PICKLE, PICKLE_SUFFIXES
from cardan.weights.safetensors import INDEX_NAME, read_index

_SHARD = re.compile(r".+-\d{5}-of-(\d{5})\.safetensors")
_GGUF_PART = re.compile(r".+-\d{5}-of-\d{5}\.gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The weights in a folder; one of the two is set.

    Attributes:
        gguf: a GGUF file.
        safetensors: files in order.
        weight_map: the file of each tensor, where there is an index.
    """

    gguf: Path | None = None
    safetensors: tuple[Path, ...] = ()
    weight_map: dict[str, Path] | None = None


def find_weights(folder: Path) -> WeightFiles:
    """Choose the weights of a folder: ``model.safetensors``, an index, the only safetensors file, the only GGUF file.

    Raises:
        CheckpointError: there are none, several without an index, or only pickles.
    """
    safetensors = _files(folder, ".safetensors")
    if (whole := folder / "model.safetensors") in safetensors:
        return WeightFiles(safetensors=(whole,))
    if (index := _index(folder)).is_file():
        weight_map = read_index(index)
        return WeightFiles(safetensors=tuple(sorted(set(weight_map.values()))), weight_map=weight_map)
    if len(safetensors) == 1:
        check_whole(safetensors[0])
        return WeightFiles(safetensors=(safetensors[0],))
    if safetensors:
        raise CheckpointError(
            f"{folder} has {len(safetensors)} safetensors files ({_listing(safetensors)}) and no {INDEX_NAME} "
            "that says which tensor is where. Fetch the index, or pass one file."
        )
    return _find_gguf(folder)


def _index(folder: Path) -> Path:
    """The index under its usual name, else the only one."""
    usual = folder / INDEX_NAME
    others = sorted(folder.glob("*.safetensors.index.json"))
    return others[0] if len(others) == 1 and not usual.is_file() else usual


def _find_gguf(folder: Path) -> WeightFiles:
    files = [file for file in _files(folder, ".gguf") if not file.name.startswith("mmproj")]
    if len(files) == 1:
        return WeightFiles(gguf=files[0])
    if files:
        advice = "Merge the parts of a split file first" if _GGUF_PART.fullmatch(files[0].name) else "Pass one of them"
        raise CheckpointError(f"{folder} has {len(files)} GGUF files ({_listing(files)}). {advice}.")
    raise _no_weights(folder)


def _no_weights(folder: Path) -> CheckpointError:
    pickles = [file for suffix in PICKLE_SUFFIXES for file in _files(folder, suffix)]
    if pickles:
        return CheckpointError(f"{folder} has its weights in pickles only ({_listing(pickles)}). {CONVERT_PICKLE}")
    if (folder / "adapter_config.json").is_file():
        return CheckpointError(f"{folder} is an adapter, not a model. Merge it into its base model and pass that.")
    if (folder / "config.json").is_file():
        return CheckpointError(
            f"{folder} has a config.json but no weights: no *.safetensors and no *.gguf. Fetch the weights, "
            "or pass --random-weights SEED to fill them at random."
        )
    content = sorted(file.name for file in folder.iterdir())
    found = f"it has {', '.join(content[:5])}{' …' if len(content) > 5 else ''}" if content else "it is empty"
    return CheckpointError(
        f"{folder} is no model: {found}. Expected config.json with *.safetensors, or one *.gguf file."
    )


def check_whole(file: Path) -> None:
    """Refuse a safetensors file that its name says is one shard of several.

    Raises:
        CheckpointError: it is.
    """
    match = _SHARD.fullmatch(file.name)
    if match and int(match[1]) > 1:
        raise CheckpointError(
            f"{file} is one of {int(match[1])} shards. Pass the folder that has all of them and {INDEX_NAME}."
        )


def read_config(folder: Path) -> dict[str, Any]:
    """The ``config.json`` of a folder.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has safetensors but no config.json, which says what model they are. Fetch it from where the "
            "weights came from."
        )
    return read_json_object(path)


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The ``generation_config.json`` of a folder, empty where there is none.

    Raises:
        CheckpointError: it is damaged.
    """
    path = folder / "generation_config.json"
    return read_json_object(path) if path.is_file() else {}


def _files(folder: Path, suffix: str) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() == suffix and file.is_file())


def _listing(files: list[Path]) -> str:
    return ", ".join(file.name for file in files[:5]) + (" …" if len(files) > 5 else "")
