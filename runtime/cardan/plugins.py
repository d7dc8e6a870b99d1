"""Plugins: entry points found from metadata and loaded under guard, and the hooks of general plugins.

It does not know what a plugin registers, nor where: hooks get plain functions, and the engine owns the registries.
The platforms' group is read by ``cardan.platform.discovery``.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import pluggy

from cardan.errors import PluginError


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


# --- general plugins ----------------------------------------------------------------------------

GROUP = "cardan.plugins"
"""Entry-point group of general plugins: modules or objects whose functions are marked with ``hookimpl``."""

_hookspec = pluggy.HookspecMarker("cardan")
hookimpl = pluggy.HookimplMarker("cardan")
"""Marks a function of a plugin as the implementation of the hook of the same name."""

Register: TypeAlias = Callable[[str, Any], None]
"""Adds something under a name; a name that is taken is an error."""


class Hooks:
    """The hooks, called once while an engine starts. None is called while it runs."""

    @_hookspec
    def register_models(self, register: Register) -> None:
        """Add model architectures.

        ``register(architecture, builder)``: ``architecture`` is what ``architectures`` of a ``config.json`` names;
        ``builder(config, name, tensors)`` returns a ``cardan.platform.Model``, as in ``cardan.models.MODEL_FAMILIES``.
        """

    @_hookspec
    def register_checkpoint_methods(self, register: Register) -> None:
        """Add ways in which checkpoints are quantized.

        ``register(name, method)``: ``name`` is ``quant_method`` of a ``config.json``, and what ``--quantization``
        takes for such a checkpoint; ``method`` is a ``cardan.weights.quantized.CheckpointMethod``.
        """

    @_hookspec
    def register_schedule_policies(self, register: Register) -> None:
        """Add orders of the waiting queue.

        ``register(name, policy)``: ``name`` is what ``--schedule-policy`` takes; ``policy`` is a
        ``cardan.scheduler.SchedulePolicy``.
        """

    @_hookspec
    def register_eviction_policies(self, register: Register) -> None:
        """Add orders in which cached prefixes are given up.

        ``register(name, rank)``: ``name`` is what ``--radix-eviction-policy`` takes; ``rank(node)`` returns a tuple of
        integers, and the node with the lowest goes first.
        """

    @_hookspec
    def register_grammar_backends(self, register: Register) -> None:
        """Add compilers of grammars.

        ``register(name, kind)``: ``name`` is what ``--grammar-backend`` takes; ``kind`` is a
        ``cardan.grammar.BackendKind``.
        """

    @_hookspec
    def register_tool_call_parsers(self, register: Register) -> None:
        """Add formats in which models write calls of tools.

        ``register(name, format)``: ``name`` is what ``--tool-call-parser`` takes; ``format`` is a
        ``cardan.parsers.ToolFormat``.
        """

    @_hookspec
    def register_reasoning_parsers(self, register: Register) -> None:
        """Add formats in which models mark their reasoning.

        ``register(name, format)``: ``name`` is what ``--reasoning-parser`` takes; ``format`` is a
        ``cardan.parsers.ReasoningFormat``.
        """


def load_plugins(entry_points: Iterable[EntryPointLike] | None = None) -> pluggy.PluginManager:
    """Load all general plugins; the manager's ``hook`` calls them.

    Raises:
        PluginError: one fails to load, implements no hook, or implements one that does not exist or takes other
            arguments. Such a plugin would silently do nothing, so it ends the start.
    """
    manager = pluggy.PluginManager("cardan")
    manager.add_hookspecs(Hooks)
    known = ", ".join(hook_names())
    for plugin in installed(GROUP, entry_points):
        where = f"Plugin {plugin.name!r} ({plugin.origin}, {plugin.entry_point.value})"
        loaded = load_guarded(plugin)
        if loaded.error is not None:
            raise PluginError(
                f"{where} failed to load: {describe_error(loaded.error)}. Repair or uninstall {plugin.distribution}."
            ) from loaded.error
        try:
            manager.register(loaded.value, name=f"{plugin.name} ({plugin.origin})")
            manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(
                f"{where} does not fit: {describe_error(error)}. "
                f"Hooks are {known}; docs/plugins.md has their signatures."
            ) from error
        if not manager.get_hookcallers(loaded.value):
            raise PluginError(
                f"{where} implements no hook. Mark functions with cardan.plugins.hookimpl; hooks are {known}."
            )
    return manager


def hook_names() -> tuple[str, ...]:
    """Names of all hooks, in the order of their declaration."""
    return tuple(name for name in vars(Hooks) if not name.startswith("_"))
