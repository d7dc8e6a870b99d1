"""Logging of the child processes: to standard error, each line with its process.

It does not know what is logged.
"""

from __future__ import annotations

import logging
import sys


def set_up_logging(process: str, level: str) -> None:
    """Write log records of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s", "%H:%M:%S"))
    root = logging.getLogger("cardan")
    root.addHandler(handler)
    root.setLevel(level.upper())
    root.propagate = False
