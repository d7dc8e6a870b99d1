"""Recordings of the scheduler's steps, started and ended over HTTP, in the folder that the server was started with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from server_fakes import ServerThread

from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig, SchedulerConfig, ServerConfig
from cardan.testing import write_tiny_model

ASKED = {"text": "Hello", "sampling_params": {"max_new_tokens": 6, "temperature": 0}}


def served(folder: Path, profiles: Path | None, plain: bool = False) -> ServerThread:
    config = EngineConfig(
        model=ModelConfig(model=str(write_tiny_model(folder / "tiny")), served_model_name="tiny"),
        platform=PlatformConfig(platform="null"),
        cache=CacheConfig(max_total_tokens=1024),
        scheduler=SchedulerConfig(random_seed=1, disable_overlap_schedule=plain),
        server=ServerConfig(
            port=0, log_level="error", admin_api_key="owner", profile_folder=None if profiles is None else str(profiles)
        ),
    )

    async def make() -> Any:
        from cardan.engine import Frontend

        return await Frontend.start(config)

    return ServerThread(make, config).start()


def spans(path: str) -> list[dict[str, Any]]:
    trace = json.loads(Path(path).read_text())
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize("plain", [False, True])
def test_steps_are_recorded(tmp_path: Path, plain: bool) -> None:
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    server = served(tmp_path, profiles, plain)
    key = {"Authorization": "Bearer owner"}
    try:
        before = server.http.post("/generate", json=ASKED).json()
        for path in ("/start_profile", "/stop_profile"):
            assert server.http.post(path, json={}).status_code == 401
        assert server.http.post("/stop_profile", headers=key).json()["error"]["code"] == "not_started"
        assert server.http.post("/start_profile", headers=key).json()["success"] is True
        twice = server.http.post("/start_profile", json={}, headers=key)
        assert (twice.status_code, twice.json()["error"]["code"]) == (400, "busy")
        assert server.http.post("/generate", json=ASKED).json()["output_ids"] == before["output_ids"]
        told = server.http.post("/stop_profile", headers=key).json()
        assert Path(told["file"]).parent == profiles
        found = spans(told["file"])
        launches = [event for event in found if event["name"] == "launch"]
        assert launches[0]["args"]["mode"] == "extend"
        assert {event["args"]["mode"] for event in launches[1:]} == {"decode"}
        assert sum(event["args"]["rows"] for event in launches) >= 6
        assert {event["name"] for event in found} == {"plan", "launch", "sample", "wait", "commit"}
        assert all(event["dur"] >= 0 for event in found)
        # A recording of some steps ends by itself.
        server.http.post("/start_profile", json={"num_steps": 2}, headers=key)
        server.http.post("/generate", json=ASKED)
        assert server.http.post("/stop_profile", headers=key).json()["error"]["code"] == "not_started"
        (other,) = {str(path) for path in profiles.iterdir()} - {told["file"]}
        assert len([event for event in spans(other) if event["name"] == "launch"]) == 2
    finally:
        server.stop()


def test_no_request_names_a_folder(start_fake: Any) -> None:
    server = start_fake()
    for body, message in (
        ({"output_dir": "/etc"}, "--profile-folder names"),
        ({"num_steps": 0}, "greater than or equal to 1"),
        ({"with_stack": True}, "send 'num_steps' or nothing"),
    ):
        response = server.http.post("/start_profile", json=body)
        assert response.status_code == 400, response.text
        assert message in response.json()["error"]["message"]


def test_without_a_folder_it_is_off(tmp_path: Path) -> None:
    server = served(tmp_path, None)
    try:
        refused = server.http.post("/start_profile", json={}, headers={"Authorization": "Bearer owner"})
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "feature_not_enabled"
        assert "--profile-folder" in refused.json()["error"]["message"]
    finally:
        server.stop()


def test_a_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    from cardan.engine.profiling import StepTrace
    from cardan.errors import RequestError

    with pytest.raises(RequestError, match="could not be written"):
        StepTrace(tmp_path / "gone", 1).write()
