"""Lets general plugins add to the registries of models, policies and parsers, once per process.

It knows no plugin; ``cardan.plugins`` finds and checks them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from cardan.cache import EVICTION_POLICIES
from cardan.errors import PluginError
from cardan.grammar import GRAMMAR_BACKENDS
from cardan.models import register_model
from cardan.parsers import REASONING_FORMATS, TOOL_FORMATS, check_tool_format
from cardan.plugins import EntryPointLike, Register, load_plugins
from cardan.scheduler import SCHEDULE_POLICIES
from cardan.weights.quantized import METHODS


@functools.cache
def apply_installed_plugins() -> None:
    """Apply the plugins that are installed; later calls in the same process do nothing.

    Raises:
        PluginError: a plugin does not load or fit, or takes a name that is taken.
        ConfigError: a plugin registers a model architecture that is registered already.
    """
    apply_plugins()


def apply_plugins(entry_points: Iterable[EntryPointLike] | None = None) -> None:
    """Call every registering hook of all general plugins.

    Args:
        entry_points: taken instead of those installed.

    Raises:
        PluginError: a plugin does not load or fit, or takes a name that is taken.
        ConfigError: a plugin registers a model architecture that is registered already.
    """
    hooks = load_plugins(entry_points).hook
    hooks.register_models(register=register_model)
    hooks.register_checkpoint_methods(register=_adder(METHODS, "quant_method"))
    hooks.register_schedule_policies(register=_adder(SCHEDULE_POLICIES, "--schedule-policy"))
    hooks.register_grammar_backends(register=_adder(GRAMMAR_BACKENDS, "--grammar-backend"))
    hooks.register_eviction_policies(register=_adder(EVICTION_POLICIES, "--radix-eviction-policy"))
    hooks.register_tool_call_parsers(register=_adder(TOOL_FORMATS, "--tool-call-parser", check_tool_format))
    hooks.register_reasoning_parsers(register=_adder(REASONING_FORMATS, "--reasoning-parser"))


def _adder(registry: MutableMapping[str, Any], flag: str, check: Callable[[str, Any], None] | None = None) -> Register:
    def register(name: str, value: Any) -> None:
        if name in registry:
            raise PluginError(
                f"A plugin registers {name!r} for {flag}, which is registered already. Expected a new name; "
                "remove one of the two plugins, or the registration."
            )
        if check is not None:
            check(name, value)
        registry[name] = value

    return register
