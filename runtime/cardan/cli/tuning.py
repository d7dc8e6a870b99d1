"""``cardan tune``: measure what the kernels of a platform choose by, once, and keep it for later starts.

It knows no platform and no kernel, and measures nothing itself: ``cardan.engine.tuning`` does.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cardan.cli.terminal import StartProgress, messages, results, set_up_logging
from cardan.config import EngineConfig, ModelConfig, PlatformConfig

if TYPE_CHECKING:
    from cardan.engine.tuning import TunedNumbers

BUSY = 0.5
"""Programs that run beside, on average of the last minute, from which on a warning is shown."""


def tune(
    *,
    platform: Annotated[str, Parameter(help="Name of the platform, as `cardan platforms` lists it.")] = "auto",
    model: Annotated[
        str | None, Parameter(help="Measure with the weights' sizes and formats of this model, and nothing else.")
    ] = None,
    platform_option: Annotated[
        tuple[str, ...], Parameter(name="--platform-option", help="An option of the platform's own, name=value.")
    ] = (),
    as_json: Annotated[bool, Parameter(name="--json", help="Print JSON instead of a table.", negative="")] = False,
) -> None:
    """Measure which kernels suit this processor best, and keep that for later starts, which measure nothing."""
    from cardan.engine.tuning import tune as measure

    console = messages()
    set_up_logging("warning", console)
    config = EngineConfig(
        model=ModelConfig() if model is None else ModelConfig(model=model),
        platform=PlatformConfig(platform=platform, options=platform_option),
    )
    _warn_if_busy(console)
    with StartProgress(console) as progress:
        found = measure(config, progress, with_model=model is not None)
    if as_json:
        kept = {**asdict(found.table), "path": str(found.path), "measured": list(found.measured)}
        sys.stdout.write(json.dumps(kept, indent=2) + "\n")
    else:
        show_numbers(results(), found)


def show_numbers(console: Console, found: TunedNumbers) -> None:
    """Every number with its default, whether it was measured now, and where the table is."""
    table = Table("number", "tuned", "default", "", box=None, pad_edge=False, header_style="bold")
    for name, tunable in found.tunables.items():
        value = found.table.numbers.get(name)
        shown = "-" if value is None else str(value) + ("" if name in found.measured else " (earlier)")
        table.add_row(escape(name), shown, str(tunable.default), escape(tunable.help))
    console.print(table)
    console.print(
        f"kept for {escape(found.table.processor)}, {escape(found.table.kernels)}, in {escape(str(found.path))}",
        soft_wrap=True,
    )
    console.print(f"`cardan plan --platform {escape(found.table.platform)}` says that it is used.")


def _warn_if_busy(console: Console) -> None:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > BUSY:
        console.print(
            f"[yellow]note:[/] {load:.1f} programs ran on average of the last minute; on a machine that is busy, "
            "measurements are worth less",
            soft_wrap=True,
        )
