"""What looks on while a request runs: its log, its trace, the memory for a crash dump.

It knows none of them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from cardan.engine.api import GenerateOutput, GenerateRequest


class Watcher(Protocol):
    """Looks at the outputs of one HTTP request; it must neither raise nor wait."""

    def see(self, prompt_index: int, output: GenerateOutput) -> None:
        """Take one output of a prompt."""

    def close(self) -> None:
        """No more outputs come, however the request ended."""


WatcherMaker = Callable[[Sequence[GenerateRequest]], Watcher]
"""Makes the watcher of one HTTP request from its prompts."""
