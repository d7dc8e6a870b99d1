"""The API key: 401 without it, constant in what it says, never shown."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import openai
import pytest

KEY = "sk-schlüssel-1234"


def test_key_is_needed_but_for_health(start_fake: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server = start_fake(api_key="right-key", log_requests=True)
    with httpx.Client(base_url=server.url, verify=False) as client:
        for path in ("/health", "/health_generate", "/ready"):
            assert client.get(path).status_code == 200
        for headers in (
            {},
            {"Authorization": "Bearer wrong-key"},
            {"Authorization": "Basic right-key"},
            {"Authorization": "right-key"},
            {"Authorization": "Bearer x y"},
            {"Authorization": "Bearer right-key-and-more"},
        ):
            for path in ("/v1/models", "/server_info", "/metrics", "/nothing"):
                response = client.get(path, headers=headers)
                assert response.status_code == 401
                assert response.headers["www-authenticate"] == "Bearer"
                error = response.json()["error"]
                assert error["code"] == "invalid_api_key"
                assert error["message"] == "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY'."
        info = client.get("/server_info", headers={"Authorization": "bearer  right-key"})
        assert info.status_code == 200
        assert info.json()["config"]["server"]["api_key"] == "(set)"
        assert "right-key" not in info.text
    assert "right-key" not in caplog.text


def test_key_that_is_not_ascii(start_fake: Any) -> None:
    server = start_fake(api_key=KEY)
    with httpx.Client(base_url=server.url, verify=False) as client:
        right = {"Authorization": f"Bearer {KEY}".encode()}
        assert client.get("/v1/models", headers=right).status_code == 200
        assert client.get("/v1/models", headers={"Authorization": "Bearer x"}).status_code == 401


def test_openai_client(start_fake: Any) -> None:
    server = start_fake(api_key="right-key")
    with server.openai() as api:
        assert api.models.list().data[0].id == "tiny"
        with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
            api.with_options(api_key="wrong").models.list()
