"""Cardan: an LLM serving engine whose hardware is a plugin.

Importing it loads no array library and no platform.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cardan.engine import Engine

__version__ = "0.1.0"
__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from cardan.engine import Engine

        return Engine
    raise AttributeError(f"module 'cardan' has no attribute {name!r}")
