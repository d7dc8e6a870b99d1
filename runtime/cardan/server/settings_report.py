"""The settings of a server as plain data that may be shown: keys and passwords are not in it.

It knows no route.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cardan.config import EngineConfig

SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")
"""Settings of the server that nobody is shown."""


def shown_settings(config: EngineConfig) -> dict[str, Any]:
    """All settings by group; a secret that is set reads ``(set)``."""
    settings = dataclasses.asdict(config)
    for name in SECRETS:
        if settings["server"][name] is not None:
            settings["server"][name] = "(set)"
    return settings
