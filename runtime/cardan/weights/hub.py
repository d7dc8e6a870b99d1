"""Models with a Hugging Face hub id: in the hub's cache on this machine, else from the hub itself.

It opens no weights, and uses ``huggingface_hub`` only where it is installed and the hub may be asked.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cardan.config import hub_cache_dir, hub_offline
from cardan.errors import CheckpointError, ModelNotFoundError
from cardan.weights.folder import find_weights
from cardan.weights.kinds import CONVERT_PICKLE, PICKLE_SUFFIXES
from cardan.weights.safetensors import INDEX_NAME

_COMMIT = re.compile(r"[0-9a-f]{40}")

_SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")


class Wanted(enum.Enum):
    """Which files of a repository are needed."""

    MODEL = "model"
    TOKENIZER = "tokenizer"
    DESCRIPTION = "description"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """What to find.

    Attributes:
        repo: ``owner/name``.
        name: one GGUF file of the repository, or None for the whole model.
        revision: branch, tag or commit.
    """

    repo: str
    name: str | None
    revision: str | None

    @property
    def label(self) -> str:
        """As the user would write it."""
        at = f"@{self.revision}" if self.revision else ""
        return self.repo + at + (f"/{self.name}" if self.name else "")


def find_on_hub(flag: str, file: HubFile, wanted: Wanted) -> Path:
    """The folder or GGUF file on this machine, downloaded if need be.

    Raises:
        ModelNotFoundError: neither the cache nor the hub has it; the message says what was tried.
        CheckpointError: it has no weights that Cardan reads.
    """
    tried = [f"no such folder {Path.cwd() / file.repo}"]
    cached = _find_cached(file, wanted, tried)
    if cached is not None:
        return cached
    if hub_offline():
        tried.append("HF_HUB_OFFLINE is set, so the hub was not asked")
    else:
        fetched = _fetch(file, wanted, tried)
        if fetched is not None:
            return fetched
    raise ModelNotFoundError(
        f"{flag} {file.label} was not found: {'; '.join(tried)}. "
        "Pass a folder or a .gguf file, or download the model where there is a network and copy it here."
    )


# --- the cache ----------------------------------------------------------------------------------


def _find_cached(file: HubFile, wanted: Wanted, tried: list[str]) -> Path | None:
    repo = hub_cache_dir() / f"models--{file.repo.replace('/', '--')}"
    snapshot = _snapshot(repo, file.revision or "main")
    if snapshot is None:
        tried.append(f"not in the hub's cache {repo.parent}")
        return None
    problem = _incomplete(snapshot, file, wanted)
    if problem is None:
        return snapshot / file.name if file.name else snapshot
    tried.append(f"the hub's cache is incomplete ({problem})")
    return None


def _snapshot(repo: Path, revision: str) -> Path | None:
    commit = revision
    ref = repo / "refs" / revision
    if not _COMMIT.fullmatch(revision) and ref.is_file():
        commit = ref.read_text().strip()
    snapshot = repo / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def _incomplete(snapshot: Path, file: HubFile, wanted: Wanted) -> str | None:
    if file.name is not None:
        return None if (snapshot / file.name).is_file() else f"{snapshot / file.name} is missing"
    if wanted is not Wanted.MODEL:
        needed = "config.json" if wanted is Wanted.DESCRIPTION else "tokenizer_config.json"
        alternatives = [snapshot / needed, snapshot / "tokenizer.json"]
        return None if any(path.is_file() for path in alternatives) else f"{snapshot / needed} is missing"
    try:
        find_weights(snapshot)
    except CheckpointError as error:
        return str(error).rstrip(".")
    return None


# --- the hub ------------------------------------------------------------------------------------


def _fetch(file: HubFile, wanted: Wanted, tried: list[str]) -> Path | None:
    try:
        import huggingface_hub
    except ImportError:
        tried.append("huggingface_hub is not installed, so the hub was not asked (pip install 'cardan[hub]')")
        return None
    failures = _failures()
    try:
        names = huggingface_hub.list_repo_files(file.repo, revision=file.revision)
    except failures as error:
        tried.append(_said(error))
        return None
    patterns = _patterns(file, wanted, names)
    try:
        folder = huggingface_hub.snapshot_download(
            file.repo, revision=file.revision, cache_dir=hub_cache_dir(), allow_patterns=list(patterns)
        )
    except failures as error:
        tried.append(_said(error))
        return None
    return Path(folder) / file.name if file.name else Path(folder)


def _failures() -> tuple[type[Exception], ...]:
    """What asking the hub may raise: the library's own error derives from that of the HTTP library under it."""
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, ValueError, RuntimeError, *HfHubHTTPError.__bases__)


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"the hub said {type(error).__name__}: {text[:300]}"


def _patterns(file: HubFile, wanted: Wanted, names: Sequence[str]) -> tuple[str, ...]:
    """Which files to download: never more than one kind of weights.

    Raises:
        CheckpointError: there is nothing that Cardan reads, or a choice to make.
    """
    if wanted is not Wanted.MODEL:
        return _SMALL_FILES
    if file.name is not None:
        if file.name not in names:
            raise CheckpointError(f"{file.repo} on the hub has no file {file.name}; it has {_some(names, '.gguf')}.")
        return (file.name,)
    top = [name for name in names if "/" not in name]
    if "model.safetensors" in top:
        return (*_SMALL_FILES, "model.safetensors")
    if INDEX_NAME in top:
        return (*_SMALL_FILES, "model-*.safetensors")
    for suffix in (".safetensors", ".gguf"):
        weights = [name for name in top if name.endswith(suffix)]
        if len(weights) == 1:
            return (*_SMALL_FILES, weights[0])
        if weights and suffix == ".gguf":
            raise CheckpointError(
                f"{file.repo} on the hub has {len(weights)} GGUF files: {_some(top, '.gguf')}. "
                f"Choose one: --model {file.repo}/{weights[0]}."
            )
    if any(name.endswith(PICKLE_SUFFIXES) for name in top):
        raise CheckpointError(f"{file.repo} on the hub has its weights in pickles only. {CONVERT_PICKLE}")
    raise CheckpointError(f"{file.repo} on the hub has no weights: no *.safetensors and no *.gguf.")


def _some(names: Sequence[str], suffix: str) -> str:
    chosen = [name for name in names if name.endswith(suffix)]
    return (", ".join(chosen[:6]) + (" …" if len(chosen) > 6 else "")) or f"no {suffix} file"
