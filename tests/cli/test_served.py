"""A server in a process of its own: what is said where it ends, or is not ready in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from cardan.cli import served
from cardan.config import EngineConfig, ModelConfig, PlatformConfig
from cardan.errors import EngineDeadError


def config_of(model: Path) -> EngineConfig:
    return EngineConfig(model=ModelConfig(model=str(model)), platform=PlatformConfig(platform="cpu"))


def test_a_server_that_ends_is_said_with_the_end_of_its_log(tmp_path: Path) -> None:
    absent, log = tmp_path / "absent", tmp_path / "server.log"
    with (
        pytest.raises(EngineDeadError, match=r"(?s)The server ended with exit code 1\. The end of .*server\.log:\n.*"),
        served.serving(config_of(absent), log),
    ):
        raise AssertionError("there is no such model")
    assert "absent" in log.read_text(encoding="utf-8")


def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "START_S", 0.0)
    with (
        pytest.raises(EngineDeadError, match=r"The server was not ready after 0 s\. It wrote no log\."),
        served.serving(config_of(tmp_path), tmp_path / "server.log"),
    ):
        raise AssertionError("nothing is ready at once")
