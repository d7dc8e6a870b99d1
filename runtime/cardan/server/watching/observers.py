"""What a server's settings say shall look on at its requests, opened before the model loads.

It knows no route, and of a request nothing but that it is watched.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cardan.config import ServerConfig
from cardan.engine.api import AsyncEngine
from cardan.server.watching.crash_dump import CrashMemory
from cardan.server.watching.request_log import RequestLog
from cardan.server.watching.tracing import Tracing
from cardan.server.watching.watchers import WatcherMaker


@dataclass(frozen=True, slots=True)
class Observers:
    """What looks on.

    Attributes:
        crash: remembers requests for a crash dump, where a folder is named.
        tracing: sends traces, where a collector is named.
    """

    crash: CrashMemory | None = None
    tracing: Tracing | None = None

    @classmethod
    def open(cls, server: ServerConfig) -> Observers:
        """What ``server`` asks for.

        Raises:
            ConfigError: the folder cannot be written, the collector's address is none, or its package is missing.
        """
        return cls(
            crash=CrashMemory(Path(server.crash_dump_folder)) if server.crash_dump_folder else None,
            tracing=Tracing(server.otlp_traces_endpoint) if server.otlp_traces_endpoint else None,
        )

    def makers(self, server: ServerConfig, engine: AsyncEngine) -> tuple[WatcherMaker, ...]:
        """Makers of the watchers of each request."""
        makers: list[WatcherMaker] = []
        if server.log_requests:
            makers.append(lambda requests: RequestLog(server, requests, engine.tokenizer))
        makers.extend(part.watch for part in (self.crash, self.tracing) if part is not None)
        return tuple(makers)

    def close(self) -> None:
        """Send what is left."""
        if self.tracing is not None:
            self.tracing.close()
