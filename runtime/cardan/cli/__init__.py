"""The command line. Everything that is printed to a terminal is printed here.

Importing it loads no command, no array library and no platform.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``cardan`` with the given arguments (those of the process by default) and exit."""
    from cardan.cli.app import run

    raise SystemExit(run(argv))
