"""Find the files of a model by what the user called it: alias, path, Hugging Face cache, hub.

It opens no weights. Nothing is fetched when the files are here already.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cardan.config import ModelConfig
from cardan.errors import ConfigError, ModelNotFoundError
from cardan.weights.bundled import BUNDLED, fetch_bundled
from cardan.weights.hub import HubFile, Wanted, find_on_hub

_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+?)(?:/([\w.-]+\.gguf))?")


@dataclass(frozen=True, slots=True)
class Located:
    """Files of a model or tokenizer that are on this machine.

    Attributes:
        path: a folder or a file.
        name: a short name.
    """

    path: Path
    name: str


def locate_model(config: ModelConfig, progress: Callable[[str, int, int], None] | None = None) -> Located:
    """Find a model, fetching it when it is the bundled alias or a hub id.

    Raises:
        ModelNotFoundError: it is nowhere; the message says where it was looked for.
        CheckpointError: what was fetched is damaged.
        ConfigError: ``--revision`` was given for something that has none.
    """
    if config.revision is not None and (config.model in BUNDLED or _is_local(config.model)):
        raise ConfigError(
            f"--revision {config.revision} is for models on the hub, but --model {config.model} is not one. Drop it."
        )
    if config.model in BUNDLED:
        return Located(fetch_bundled(config.model, progress), config.model)
    wanted = Wanted.MODEL if config.random_weights is None else Wanted.DESCRIPTION
    return _locate("--model", config.model, config.revision, wanted)


def locate_tokenizer(tokenizer: str, progress: Callable[[str, int, int], None] | None = None) -> Located:
    """Find a tokenizer: a folder, a file in one, a GGUF file, or a hub id.

    Raises:
        ModelNotFoundError: it is nowhere; the message says where it was looked for.
    """
    if tokenizer in BUNDLED:
        return Located(fetch_bundled(tokenizer, progress), tokenizer)
    return _locate("--tokenizer", tokenizer, None, Wanted.TOKENIZER)


def _is_local(text: str) -> bool:
    return Path(text).expanduser().exists()


def _locate(flag: str, text: str, revision: str | None, wanted: Wanted) -> Located:
    path = Path(text).expanduser()
    if path.exists():
        return Located(path, path.resolve().name if path.is_dir() else path.stem)
    match = _HUB_ID.fullmatch(text)
    if match is None or text.startswith(("./", "../")):
        raise ModelNotFoundError(
            f"{flag} {text}: there is no such file or folder, and it is no hub id (owner/name) and no bundled name "
            f"({', '.join(BUNDLED)}). The current folder is {Path.cwd()}."
        )
    file = HubFile(repo=match[1], name=match[2], revision=revision)
    found = find_on_hub(flag, file, wanted)
    return Located(found, found.stem if match[2] else match[1].rsplit("/", 1)[1])
