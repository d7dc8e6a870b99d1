"""HTTP in front of an engine: the native API, OpenAI's, health, administration and metrics.

It knows the engine only through ``cardan.engine.api``; nothing here touches a device.
"""

from __future__ import annotations

from cardan.server.app import create_app
from cardan.server.serve import ServingInfo, serve

__all__ = ["ServingInfo", "create_app", "serve"]
