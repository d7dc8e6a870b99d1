"""Logging of the engine's processes: to standard error, as text with date and process, or as one JSON object a line.

It does not know what is logged. Records that cannot be written (a full disk) are lost, as ``logging`` has it.
"""

from __future__ import annotations

import datetime
import logging
import sys

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


def log_handler(process: str, server: ServerConfig) -> logging.Handler:
    """A handler that writes records of this process to standard error in the form that ``server`` asks for."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s", _DATES)
    handler.setFormatter(JsonFormatter(process) if server.log_format == "json" else text)
    return handler


def set_up_logging(process: str, server: ServerConfig) -> None:
    """Write log records of this process to standard error."""
    root = logging.getLogger("cardan")
    root.addHandler(log_handler(process, server))
    root.setLevel(server.log_level.upper())
    root.propagate = False
