"""Serves in a process of its own: ``run_server.py '{"delay_s": …, "server": {…}}'``.

Writes one JSON line when ready, and one when the engine is closed. With ``"model"`` the engine is the real one, on
the null platform; otherwise a fake.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from server_fakes import FakeEngine, server_config

from cardan.config import EngineConfig, ModelConfig, PlatformConfig, ServerConfig
from cardan.errors import CheckpointError
from cardan.server import ServingInfo, serve


def say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class TellingEngine(FakeEngine):
    async def close(self) -> None:
        await super().close()
        say(closed=True, open=len(self.open))


def main() -> int:
    options = json.loads(sys.argv[1])

    async def start(_: EngineConfig) -> FakeEngine:
        say(loading=True)
        await asyncio.sleep(options.get("loading_s", 0))
        if options.get("broken"):
            raise CheckpointError("The weights are truncated.")
        return TellingEngine(delay_s=options.get("delay_s", 0))

    def ready(info: ServingInfo) -> None:
        say(url=info.url, port=info.port, model=info.engine.model_name)

    if "model" in options:
        config = EngineConfig(
            model=ModelConfig(model=options["model"], served_model_name="tiny"),
            platform=PlatformConfig(platform="null", options=("step_ms=20",)),
            server=ServerConfig(port=0, log_level="error"),
        )
        return serve(config, on_ready=ready)
    try:
        return serve(server_config(**options.get("server", {})), on_ready=ready, start_engine=start)
    except CheckpointError as error:
        say(error=str(error))
        return 3


if __name__ == "__main__":
    sys.exit(main())
