"""Logging of the engine's processes: to standard error, as text with date and process, or as one JSON object a line.

It does not know what is logged. A log that cannot be written (a full disk) never stops a process: records are lost.
"""

from __future__ import annotations

import datetime
import logging
import sys
from typing import TextIO

import msgspec

from cardan.config import ServerConfig

_DATES = "%Y-%m-%d %H:%M:%S"


class JsonFormatter(logging.Formatter):
    """Records as JSON objects: ``time`` (UTC, ISO 8601), ``level``, ``process``, ``logger``, ``message``, what a record
    has under ``fields``, and ``error`` with the traceback of an exception.
    """

    def __init__(self, process: str) -> None:
        """Name the process in every record."""
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        entry = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry, enc_hook=repr).decode()


class _LossyHandler(logging.StreamHandler[TextIO]):
    """Drops what cannot be written, without a word: there is nowhere to say it."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def log_handler(process: str, server: ServerConfig) -> logging.Handler:
    """A handler that writes records of this process to standard error in the form that ``server`` asks for."""
    handler = _LossyHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s", _DATES)
    handler.setFormatter(JsonFormatter(process) if server.log_format == "json" else text)
    return handler


def set_up_logging(process: str, server: ServerConfig) -> None:
    """Write log records of this process to standard error."""
    root = logging.getLogger("cardan")
    root.addHandler(log_handler(process, server))
    root.setLevel(server.log_level.upper())
    root.propagate = False
