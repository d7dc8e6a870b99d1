"""``cardan platforms``, ``plan``, ``fetch`` and ``version``: answers without starting an engine."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated, Any

from cyclopts import Parameter

from cardan import __version__
from cardan.cli.flags import ENGINE_GROUPS, config_flags, log_level_flag, read_config, takes_flags
from cardan.cli.terminal import (
    StartProgress,
    messages,
    results,
    set_up_logging,
    show_capabilities,
    show_plan,
    show_platforms,
)
from cardan.errors import PlatformNotFoundError

JsonFlag = Annotated[bool, Parameter(name="--json", help="Print JSON instead of tables.", negative="")]


def version() -> None:
    """Print the version of Cardan, of its platform API, and of the installed platforms."""
    from cardan.platform import PLATFORM_API
    from cardan.platform.discovery import find_plugins

    console = results()
    console.print(f"cardan {__version__}, platform API {PLATFORM_API}")
    for plugin in find_plugins():
        console.print(f"platform {plugin.name}: {plugin.origin}", markup=False)


def platforms(
    name: Annotated[str | None, Parameter(help="Show what this platform can do.")] = None, *, as_json: JsonFlag = False
) -> None:
    """List the installed platforms and whether each can run here; with a name, its capabilities and options."""
    from cardan.platform.discovery import load_platform, survey
    from cardan.platform.report import capability_rows, option_rows, platform_rows

    if name is None:
        rows = platform_rows(survey())
        if as_json:
            _print_json([asdict(row) for row in rows])
        else:
            show_platforms(results(), rows)
        return
    platform = load_platform(name)
    options = option_rows(platform.options())
    availability = platform.probe()
    devices = platform.devices() if availability.usable else ()
    if not devices:
        raise PlatformNotFoundError(
            f"Platform {name!r} cannot run on this machine: {availability.reason.rstrip('.')}. "
            "`cardan platforms` shows what can."
        )
    for device in devices:
        capabilities = platform.capabilities(device)
        answers = capability_rows(capabilities)
        if as_json:
            _print_json(
                {
                    "device": asdict(device),
                    "page_sizes": list(capabilities.page_sizes),
                    "capabilities": [asdict(row) for row in answers],
                    "options": [asdict(row) for row in options],
                    "notes": list(capabilities.notes),
                }
            )
            continue
        console = results()
        console.print(f"{platform.name} {device.index}: {device.name} {device.detail}".rstrip(), markup=False)
        console.print(f"page sizes: {', '.join(str(size) for size in capabilities.page_sizes)}")
        show_capabilities(console, answers, options)


@takes_flags((*config_flags(ENGINE_GROUPS), log_level_flag()))
def plan(*, as_json: JsonFlag = False, **values: Any) -> None:
    """Show what would run and why, opening no device and loading no weights."""
    from cardan.engine.preparation import open_and_resolve
    from cardan.platform.report import plan_to_json

    config = read_config({"server__log_level": "warning", **values})
    console = messages()
    set_up_logging(config.server.log_level, console)
    with StartProgress(console) as progress:
        opened = open_and_resolve(config, progress)
        opened.checkpoint.close()
    resolved = plan_to_json(opened.plan)
    if as_json:
        _print_json(resolved)
    else:
        show_plan(results(), resolved)


def fetch(model: Annotated[str, Parameter(help="A short name, a hub id, or a path.")] = "smollm2-135m") -> None:
    """Fetch a model ahead of its first use and print where it is kept."""
    from cardan.config import ModelConfig
    from cardan.weights import open_checkpoint

    with StartProgress(messages()) as progress:
        checkpoint = open_checkpoint(ModelConfig(model=model), progress)
    sys.stdout.write(f"{checkpoint.path}\n")
    checkpoint.close()


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
