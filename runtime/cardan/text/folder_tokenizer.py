"""Builds a tokenizer from a folder with ``tokenizer.json`` and the files that usually lie beside it.

It does not know GGUF, and never reads ``tokenizer.model``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from cardan.errors import CheckpointError
from cardan.text.gguf_tokenizer import set_bos_eos
from cardan.text.parts import TokenizerParts

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_TEMPLATE_FILE = "chat_template.json"


def build_from_folder(folder: Path) -> TokenizerParts:
    """Build a tokenizer from ``folder``.

    Raises:
        CheckpointError: there is no ``tokenizer.json``, or a file in the folder cannot be read.
    """
    backend = _backend(folder)
    config = _read_json(folder / "tokenizer_config.json")
    special = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
    _add_missing(backend, config, special)
    if "add_bos_token" in config or "add_eos_token" in config:
        set_bos_eos(
            backend,
            special.get("bos_token") if config.get("add_bos_token") else None,
            special.get("eos_token") if config.get("add_eos_token") else None,
        )
    bos, eos = special.get("bos_token"), special.get("eos_token")
    ends = {backend.token_to_id(eos) if eos else None, *_end_ids(folder)}
    return TokenizerParts(
        backend=backend,
        special_tokens=special,
        bos_id=backend.token_to_id(bos) if bos else None,
        eos_ids=frozenset(index for index in ends if index is not None),
        templates=_templates(folder, config),
    )


def _backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    if not path.is_file():
        if (folder / "tokenizer.model").is_file():
            raise CheckpointError(
                f"{folder} has only a SentencePiece tokenizer.model, which is not read. Add the tokenizer.json of "
                "the same model (its repository has one, or transformers' AutoTokenizer writes it with "
                "save_pretrained), or pass --tokenizer FOLDER."
            )
        raise CheckpointError(
            f"{folder} has no tokenizer.json. Pass --tokenizer FOLDER with the model's tokenizer.json."
        )
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}. Fetch it again.") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}. Fetch it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}. Fetch it again.")
    return value


def _text_of(value: Any) -> str | None:
    """A token written as a string or as ``{"content": …}``."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _special_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    special: dict[str, str] = {}
    for name in _NAMED:
        text = _text_of(special_map.get(name)) if name not in config else _text_of(config[name])
        if text is not None:
            special[name] = text
    return special


def _add_missing(backend: Backend, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Add the tokens that the other files name and ``tokenizer.json`` lacks, and mark the named ones special."""
    for index, spec in _declared_tokens(config):
        text = _text_of(spec)
        if text is None or backend.token_to_id(text) is not None:
            continue
        flags = {key: bool(spec[key]) for key in ("lstrip", "rstrip", "single_word", "normalized") if key in spec}
        token = AddedToken(text, special=bool(spec.get("special")), **flags)
        backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
        if backend.token_to_id(text) != index:
            raise CheckpointError(
                f"tokenizer_config.json gives {text!r} the id {index}, but tokenizer.json has room for it only at "
                f"{backend.token_to_id(text)}. The two files belong to different models; fetch both again."
            )
    marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    additional = config.get("additional_special_tokens") or []
    if not isinstance(additional, list):
        raise _wrong("tokenizer_config.json", "additional_special_tokens", additional, "a list of tokens")
    extra = [_text_of(value) for value in additional]
    wanted = [text for text in (*special.values(), *extra) if text is not None and text not in marked]
    known = [text for text in wanted if backend.token_to_id(text) is not None]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in dict.fromkeys(known)])


def _declared_tokens(config: Mapping[str, Any]) -> list[tuple[int, Any]]:
    """What ``added_tokens_decoder`` holds, by id."""
    declared = config.get("added_tokens_decoder") or {}
    fits = isinstance(declared, Mapping) and all(key.isdecimal() for key in declared)
    if not fits or not all(isinstance(spec, Mapping) for spec in declared.values()):
        raise _wrong("tokenizer_config.json", "added_tokens_decoder", declared, "an object of token ids and tokens")
    return sorted(((int(key), spec) for key, spec in declared.items()), key=lambda entry: entry[0])


def _end_ids(folder: Path) -> frozenset[int]:
    """The EOS ids of ``generation_config.json``, or of ``config.json`` where that says nothing."""
    for name in ("generation_config.json", "config.json"):
        found = end_ids_of(_read_json(folder / name), name)
        if found:
            return found
    return frozenset()


def end_ids_of(config: Mapping[str, Any], file_name: str = "generation_config.json") -> frozenset[int]:
    """The ids under ``eos_token_id``: one, a list, or none.

    Raises:
        CheckpointError: there is something else.
    """
    value = config.get("eos_token_id")
    if value is None:
        return frozenset()
    ids = value if isinstance(value, list | tuple) else (value,)
    if not all(type(index) is int for index in ids):
        raise _wrong(file_name, "eos_token_id", value, "a token id or a list of them")
    return frozenset(ids)


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    for file_name, given in (("tokenizer_config.json", config), (_TEMPLATE_FILE, _read_json(folder / _TEMPLATE_FILE))):
        templates.update(_named_templates(given.get("chat_template"), file_name))
    path = folder / "chat_template.jinja"
    if path.is_file():
        templates["default"] = _read_text(path)
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[extra.stem] = _read_text(extra)
    return templates


def _named_templates(value: Any, file_name: str) -> dict[str, str]:
    """Templates by name: one text is the default, a list names each."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    named = {}
    for entry in value if isinstance(value, list) else [value]:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, Mapping) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise _wrong(file_name, "chat_template", value, "a text or a list of objects with name and template")
        named[name] = text
    return named


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid UTF-8: {error}. Fetch it again.") from error


def _wrong(file_name: str, key: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(f"{file_name} has {key} = {str(value)[:80]}, expected {expected}. Fetch it again.")
