"""The admin key: what changes a server needs it, and it opens the rest."""

from __future__ import annotations

from typing import Any

import httpx

BEARER = "Authorization"


def statuses(url: str, headers: dict[str, str]) -> tuple[int, int, int]:
    with httpx.Client(base_url=url, headers=headers, verify=False) as client:
        flush = client.post("/flush_cache").status_code
        return client.get("/v1/models").status_code, flush, client.get("/health").status_code


def test_both_keys(start_fake: Any) -> None:
    url = start_fake(api_key="user", admin_api_key="boss").url
    assert statuses(url, {}) == (401, 401, 200)
    assert statuses(url, {BEARER: "Bearer user"}) == (200, 401, 200)
    assert statuses(url, {BEARER: "Bearer boss"}) == (200, 200, 200)
    assert statuses(url, {"X-API-Key": "user"}) == (200, 401, 200)
    assert statuses(url, {"X-API-Key": "boss"}) == (200, 200, 200)
    # Either header may carry it, whatever the other says.
    assert statuses(url, {BEARER: "Bearer wrong", "X-API-Key": "boss"}) == (200, 200, 200)


def test_admin_key_alone_leaves_the_rest_open(start_fake: Any) -> None:
    url = start_fake(admin_api_key="boss").url
    assert statuses(url, {}) == (200, 401, 200)
    assert statuses(url, {BEARER: "Bearer boss"}) == (200, 200, 200)


def test_the_refusal_names_the_key_that_lacks(start_fake: Any) -> None:
    server = start_fake(api_key="user", admin_api_key="boss")
    answer = httpx.post(f"{server.url}/flush_cache", headers={BEARER: "Bearer user"}, verify=False)
    expected = "The admin key is missing or wrong. Send it as 'Authorization: Bearer KEY'."
    assert answer.json()["error"]["message"] == expected


def test_no_key_is_shown(start_fake: Any) -> None:
    server = start_fake(api_key="user-key", admin_api_key="boss-key")
    text = server.http.get("/server_info").text
    assert "user-key" not in text
    assert "boss-key" not in text


def test_pages_of_allowed_origins_only(start_fake: Any) -> None:
    wanted = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    allowed = start_fake(api_key="user", cors_allow_origins=("https://page.example",))
    answer = httpx.options(f"{allowed.url}/v1/models", headers=wanted, verify=False)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    other = httpx.options(
        f"{allowed.url}/v1/models", headers={**wanted, "Origin": "https://other.example"}, verify=False
    )
    assert "access-control-allow-origin" not in other.headers
    plain = start_fake()
    assert "access-control-allow-origin" not in plain.http.get("/v1/models", headers=wanted).headers
