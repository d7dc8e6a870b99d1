"""What all of ``cardan accuracy`` shares: how an engine that is measured is configured, and bars while it runs.

It knows no record, no comparison and no score.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cardan.cli.flags import read_config
from cardan.config import EngineConfig
from cardan.errors import ConfigError

CHUNK = 128
"""Prefill chunks where the user names none: long prompts of the bundled set take several."""


def check_writable(**files: Path | None) -> None:
    """See that files can be written before anything runs for long.

    Args:
        files: by flag, such as ``html=path``; None where it was not given.

    Raises:
        ConfigError: a file's folder is missing, a folder stands in its place, or it may not be written.
    """
    for flag, path in files.items():
        what = None if path is None else _why_not_writable(path)
        if what is not None:
            raise ConfigError(f"--{flag} {path} {what}. Name a file in a folder that is there.")


def check_apart(read: Iterable[Path | None], **files: Path | None) -> None:
    """See that no file is written over one that is read, or over another that is written.

    Args:
        read: what is compared with; None where it was not given.
        files: by flag, such as ``html=path``; None where it was not given.

    Raises:
        ConfigError: two are the same.
    """
    taken = {path.resolve(): f"{path}, which is read" for path in read if path is not None}
    for flag, path in files.items():
        if path is None:
            continue
        if path.resolve() in taken:
            raise ConfigError(f"--{flag} {path} would be written over {taken[path.resolve()]}. Name another file.")
        taken[path.resolve()] = f"what --{flag} writes"


def _why_not_writable(path: Path) -> str | None:
    folder = path.absolute().parent
    if path.is_dir():
        return "is a folder"
    if not folder.is_dir():
        return f"is in {path.parent}, which is no folder"
    return None if os.access(path if path.exists() else folder, os.W_OK) else "may not be written"


class Bars:
    """Shows how far each part is."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, part: str, done: int, total: int) -> None:
        """Move a part's bar, or begin it."""
        if part not in self._tasks:
            self._tasks[part] = self._progress.add_task(part, total=total or None)
        self._progress.update(self._tasks[part], completed=done, total=total or None)


def measured_config(values: dict[str, Any]) -> EngineConfig:
    """The config of flags, with small chunks and a fixed seed where the user names none."""
    given = {"server__log_level": "warning", "scheduler__chunked_prefill_size": CHUNK, **values}
    return read_config({**given, "scheduler__random_seed": given.get("scheduler__random_seed") or 0})
