"""The engine: processes, loops, and the two ways to use them (``Engine`` offline, ``Frontend`` in an event loop).

It knows no HTTP and no array library. Importing it loads nothing; its parts are loaded when they are named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cardan.engine.engine import Engine
    from cardan.engine.frontend import Frontend
    from cardan.engine.preparation import prepare

__all__ = ["Engine", "Frontend", "prepare"]

_HOMES = {"Engine": "engine", "Frontend": "frontend", "prepare": "preparation"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cardan.engine' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"cardan.engine.{_HOMES[name]}"), name)
