"""Entry points of plugins: found from metadata, loaded under guard.

It does not know what a plugin implements: the platforms' group is read by ``cardan.platform.discovery``.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol


class EntryPointLike(Protocol):
    """What this module needs of ``importlib.metadata.EntryPoint``."""

    @property
    def name(self) -> str:
        """The plugin's name."""

    @property
    def value(self) -> str:
        """``module:attribute``."""

    @property
    def dist(self) -> Any:
        """The distribution (``name``, ``version``), or None."""

    def load(self) -> Any:
        """Import the module and return the attribute."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """An installed plugin as its metadata describes it; nothing of it has been imported.

    Attributes:
        name: of the entry point.
        distribution: the package that brings it.
        version: of that package.
        entry_point: how to load it.
    """

    name: str
    distribution: str
    version: str
    entry_point: EntryPointLike

    @property
    def origin(self) -> str:
        """``distribution version``, for messages."""
        return f"{self.distribution} {self.version}".strip()


@dataclass(frozen=True, slots=True)
class Loaded:
    """What loading a plugin gave: an object, or the error.

    Attributes:
        plugin: which one.
        value: the loaded object; None when it failed.
        error: what the plugin raised while it was imported, or None.
    """

    plugin: Plugin
    value: Any
    error: BaseException | None = None


def installed(group: str, entry_points: Iterable[EntryPointLike] | None = None) -> tuple[Plugin, ...]:
    """Plugins of an entry-point group, sorted by name, from metadata alone.

    Args:
        group: the entry-point group.
        entry_points: taken instead of those installed.
    """
    found = importlib.metadata.entry_points(group=group) if entry_points is None else entry_points
    plugins = [_describe(entry_point) for entry_point in found]
    return tuple(sorted(plugins, key=lambda plugin: (plugin.name, plugin.distribution)))


def load_guarded(plugin: Plugin) -> Loaded:
    """Import one plugin; whatever it raises is caught and returned."""
    try:
        return Loaded(plugin, plugin.entry_point.load())
    except (Exception, SystemExit) as error:  # noqa: BLE001 - an import may raise anything; the error is returned
        return Loaded(plugin, None, error)


def describe_error(error: BaseException) -> str:
    """``Type: text`` of an exception, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _describe(entry_point: EntryPointLike) -> Plugin:
    dist = getattr(entry_point, "dist", None)
    name = getattr(dist, "name", None) or "unknown distribution"
    version = getattr(dist, "version", None) or ""
    return Plugin(entry_point.name, str(name), str(version), entry_point)
