"""Open a checkpoint: find its files, read its description, map its tensors.

It knows no model and no device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from cardan.config import ModelConfig
from cardan.errors import CheckpointError
from cardan.weights.affine_groups import AffineStore, has_affine_groups
from cardan.weights.checkpoint import ModelDescription, NoTensors, OpenedCheckpoint, TensorStore, TokenizerSource
from cardan.weights.folder import WeightFiles, check_whole, find_weights, read_config, read_generation_config
from cardan.weights.gguf import GgufStore, architecture_of, gguf_config, read_header, read_rope_factors
from cardan.weights.kinds import CONVERT_PICKLE, PICKLE_SUFFIXES, FileKind, check_kind, file_kind
from cardan.weights.kv_scales import WithoutScales, read_kv_scales
from cardan.weights.locate import Located, locate_model, locate_tokenizer
from cardan.weights.mapped_file import MappedFile
from cardan.weights.quantized import names_of, quantization_settings, quantized_store
from cardan.weights.safetensors import SafetensorsStore

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with what is being done, how much is done, and how much there is."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def open_checkpoint(config: ModelConfig, progress: Progress | None = None) -> OpenedCheckpoint:
    """Open the model that a user asked for: alias, folder, file, Hugging Face cache or hub id.

    With ``random_weights`` the result has a description and no tensors; a ``RandomCheckpoint`` is made of it once
    the model's shapes are known.

    Raises:
        ModelNotFoundError: there is no such model; the message says where it was looked for.
        CheckpointError: it is damaged, incomplete, or of a kind that is refused.
        ModelConfigError: the metadata of a GGUF file lacks a field or contradicts itself.
        UnsupportedModelError: a GGUF file of an architecture that Cardan does not read.
    """
    if config.random_weights is not None:
        return OpenedCheckpoint(open_description(config, progress), NoTensors())
    located = locate_model(config, progress)
    tokenizer = _chosen_tokenizer(config, progress)
    files = _weight_files(located.path)
    if files.gguf is not None:
        return _open_gguf(located, files.gguf, tokenizer)
    return _open_safetensors(located, files, tokenizer)


def open_description(config: ModelConfig, progress: Progress | None = None) -> ModelDescription:
    """All of a checkpoint but its tensors; a folder needs no weights for it, only a ``config.json``.

    Raises:
        ModelNotFoundError: there is no such model.
        CheckpointError: its config is missing or damaged.
        ModelConfigError: the metadata of a GGUF file lacks a field or contradicts itself.
        UnsupportedModelError: a GGUF file of an architecture that Cardan does not read.
    """
    located = locate_model(config, progress)
    tokenizer = _chosen_tokenizer(config, progress)
    path = located.path
    if path.is_dir() and (path / "config.json").is_file():
        return _describe_folder(located, path, tokenizer)
    files = _weight_files(path)
    if files.gguf is None:
        return _describe_folder(located, files.safetensors[0].parent, tokenizer)
    checkpoint = _open_gguf(located, files.gguf, tokenizer)
    checkpoint.close()
    return checkpoint.description


def _weight_files(path: Path) -> WeightFiles:
    if path.is_dir():
        return find_weights(path)
    suffix = path.suffix.lower()
    if suffix == ".gguf":
        return WeightFiles(gguf=path)
    if suffix == ".safetensors":
        check_whole(path)
        return WeightFiles(safetensors=(path,))
    if suffix in PICKLE_SUFFIXES:
        raise CheckpointError(f"{path} is a pickle by its name. {CONVERT_PICKLE}")
    raise CheckpointError(
        f"{path} is {file_kind(path).value}, and its name ends in neither .gguf nor .safetensors. "
        "Pass a folder, a .gguf or a .safetensors file."
    )


def _open_gguf(located: Located, path: Path, tokenizer: TokenizerSource | None) -> OpenedCheckpoint:
    check_kind(path, FileKind.GGUF)
    file = MappedFile(path)
    try:
        header = read_header(file)
        architecture = architecture_of(header)
        config = gguf_config(header, read_rope_factors(file, header))
        store = GgufStore(file, header, architecture, config)
    except Exception:
        file.close()
        raise
    if tokenizer is None:
        folder = path.parent if located.path.is_dir() and "tokenizer.ggml.tokens" not in header.metadata else None
        tokenizer = TokenizerSource(folder=folder) if folder else TokenizerSource(gguf=header.metadata)
    description = ModelDescription(path=path, name=located.name, config=config, tokenizer=tokenizer)
    return OpenedCheckpoint(description, store)


def _open_safetensors(located: Located, files: WeightFiles, tokenizer: TokenizerSource | None) -> OpenedCheckpoint:
    description = _describe_folder(located, files.safetensors[0].parent, tokenizer)
    store: TensorStore = SafetensorsStore(files.safetensors, files.weight_map)
    try:
        return _put_together(description, store, files.safetensors[0].parent)
    except CheckpointError:
        store.close()
        raise


def _put_together(description: ModelDescription, store: TensorStore, folder: Path) -> OpenedCheckpoint:
    """The checkpoint over a store, the tensors of quantized linears put together, scales of keys and values read."""
    scales = read_kv_scales(store)
    if scales.names:
        store = WithoutScales(store, scales)
        description = replace(description, config={**description.config, **scales.config})
    if has_affine_groups(description.config):
        return OpenedCheckpoint(description, AffineStore(store, description.config), scales.notes)
    settings = quantization_settings(folder, description.config)
    if settings is None:
        return OpenedCheckpoint(description, store, scales.notes)
    quantized = quantized_store(store, settings)
    return OpenedCheckpoint(description, quantized, (*quantized.notes, *scales.notes), names_of(settings))


def _describe_folder(located: Located, folder: Path, tokenizer: TokenizerSource | None) -> ModelDescription:
    return ModelDescription(
        path=located.path,
        name=located.name,
        config=read_config(folder),
        tokenizer=tokenizer or TokenizerSource(folder=folder),
        generation_config=read_generation_config(folder),
    )


def _chosen_tokenizer(config: ModelConfig, progress: Progress | None) -> TokenizerSource | None:
    """The tokenizer that ``--tokenizer`` names, or None for the model's own."""
    if config.tokenizer is None:
        return None
    path = locate_tokenizer(config.tokenizer, progress).path
    if path.is_file() and path.suffix.lower() == ".gguf":
        return TokenizerSource(gguf=_gguf_metadata(path))
    folder = path if path.is_dir() else path.parent
    if any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return TokenizerSource(folder=folder)
    gguf = sorted(folder.glob("*.gguf"))
    if path.is_dir() and len(gguf) == 1:
        return TokenizerSource(gguf=_gguf_metadata(gguf[0]))
    raise CheckpointError(
        f"--tokenizer {config.tokenizer}: {folder} has none of {', '.join(_TOKENIZER_FILES)}, nor a single GGUF file."
    )


def _gguf_metadata(path: Path) -> dict[str, object]:
    check_kind(path, FileKind.GGUF)
    file = MappedFile(path)
    try:
        metadata = read_header(file).metadata
    finally:
        file.close()
    if "tokenizer.ggml.tokens" not in metadata:
        raise CheckpointError(f"{path} has no tokenizer: its metadata lacks tokenizer.ggml.tokens. Pass another one.")
    return dict(metadata)
